// Formats durations, memory and file sizes as text, like core/formatting.py. Both are tested against
// tests/formatting_cases.json. No DOM access, except for the page's language.

import { gettext, interpolate } from "./i18n.js";

const UNIT_SECONDS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
const twoDigits = (number) => String(number).padStart(2, "0");

function splitDuration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  return { days: Math.floor(whole / 86400), hours: Math.floor((whole % 86400) / 3600), minutes: Math.floor((whole % 3600) / 60), left: whole % 60 };
}

/** Format a duration with at most two units, the second only if it is not zero: 3 d 4 h, 2 h 05 min, 10 min, 7 s. */
export function duration(seconds) {
  const { days, hours, minutes, left } = splitDuration(seconds);
  if (days) return interpolate(hours ? gettext("%(days)s d %(hours)s h") : gettext("%(days)s d"), { days, hours });
  if (hours && minutes) return interpolate(gettext("%(hours)s h %(minutes)s min"), { hours, minutes: twoDigits(minutes) });
  if (hours) return interpolate(gettext("%(hours)s h"), { hours });
  if (minutes && left) return interpolate(gettext("%(minutes)s min %(seconds)s s"), { minutes, seconds: twoDigits(left) });
  if (minutes) return interpolate(gettext("%(minutes)s min"), { minutes });
  return interpolate(gettext("%(seconds)s s"), { seconds: left });
}

/** Format a duration for narrow columns, as Slurm does: 2-03:04, 1:02:03, 0:07. */
export function compactDuration(seconds) {
  const { days, hours, minutes, left } = splitDuration(seconds);
  if (days) return `${days}-${twoDigits(hours)}:${twoDigits(minutes)}`;
  return hours ? `${hours}:${twoDigits(minutes)}:${twoDigits(left)}` : `${minutes}:${twoDigits(left)}`;
}

/** Format seconds as job files accept them: 9000 → 2h30m. Text is returned unchanged. */
export function durationInput(value) {
  if (typeof value !== "number") return value ?? "";
  let left = value;
  const parts = UNIT_SECONDS.map(([unit, size]) => {
    const count = Math.floor(left / size);
    left %= size;
    return count ? `${count}${unit}` : "";
  });
  return parts.join("") || "0s";
}

export function memory(mib) {
  if (mib < 1024) return `${mib} MB`;
  const gib = mib / 1024;
  return `${gib < 100 ? gib.toFixed(1).replace(/\.0$/, "") : gib.toFixed(0)} GB`;
}

/** Format GPU hours and machine hours with at most two decimals: 0.5, 12, 1.25. */
export function hours(value) { return String(Number(value.toFixed(2))); }

const MIB_PER_UNIT = { "": 1, m: 1, mb: 1, mib: 1, g: 1024, gb: 1024, gib: 1024, t: 1024 ** 2, tb: 1024 ** 2, tib: 1024 ** 2 };

/** Parse an amount such as 4 GB or 512MiB to MiB; without a unit it is in MiB. Returns null if it is not valid. */
export function parseMemory(text) {
  const found = /^\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)\s*$/i.exec(text);
  const unit = MIB_PER_UNIT[found?.[2].toLowerCase()];
  return unit === undefined ? null : Math.round(Number(found[1]) * unit);
}

/** Format MiB as `parseMemory` accepts them, without rounding: 4096 → 4 GB, 4000 → 4000 MB. Text is returned unchanged. */
export function memoryInput(value) {
  if (typeof value !== "number") return value ?? "";
  return value >= 1024 && value % 1024 === 0 ? `${value / 1024} GB` : `${value} MB`;
}

export function filesize(bytes) {
  let amount = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 1000 || unit === "GB") return `${Number(amount.toPrecision(3))} ${unit}`;
    amount /= 1000;
  }
  return "";
}

/** Format a date and time in the page's language and the reader's time zone. */
export function dateTime(value) {
  return new Intl.DateTimeFormat(document.documentElement.lang || undefined, { dateStyle: "short", timeStyle: "short" }).format(new Date(value));
}
