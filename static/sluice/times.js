// Shows times in the reader's time zone and language, and durations that change.
// <time data-local> is localized once; elements with [data-since] or [data-until] are updated every second.

import { compactDuration, duration, hours } from "./format.js";

const language = document.documentElement.lang || undefined;
const precise = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(language, { hourCycle: "h23", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const long = new Intl.DateTimeFormat(language, { hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const WITHOUT_YEAR_MS = 300 * 86400e3; // a time less than this from now is shown without the year

export function localizeTimes() {
  for (const time of document.querySelectorAll("time[data-local]")) {
    const at = new Date(time.dateTime);
    time.textContent = (Math.abs(Date.now() - at) < WITHOUT_YEAR_MS ? short : long).format(at);
    time.title = precise.format(at);
    time.removeAttribute("data-local");
  }
}

/** With data-per-hour, the amount of that many per hour, such as GPU hours; with data-clock, in the short format. */
function formatElapsed({ perHour, clock }, seconds) {
  if (perHour !== undefined) return hours((Math.max(0, seconds) / 3600) * Number(perHour));
  return clock === undefined ? duration(seconds) : compactDuration(seconds);
}

function updateDurations() {
  if (document.hidden) return;
  const now = Date.now();
  for (const place of document.querySelectorAll("[data-since], [data-until]")) {
    const { since, until } = place.dataset;
    const seconds = (since ? now - new Date(since) : new Date(until) - now) / 1000;
    const text = formatElapsed(place.dataset, seconds);
    if (place.textContent !== text) place.textContent = text;
  }
}

localizeTimes();
setInterval(updateDurations, 1000);
