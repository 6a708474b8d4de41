// Times in the reader's own zone and language, and durations that go on counting.

const language = document.documentElement.lang || undefined;
const precise = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(language, { hourCycle: "h23", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const long = new Intl.DateTimeFormat(language, { hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const interpolate = window.interpolate ?? ((text, values) => text.replace(/%\((\w+)\)s/g, (_, name) => values[name]));
const gettext = window.gettext ?? ((text) => text);

function localize() {
  for (const time of document.querySelectorAll("time[data-local]")) {
    const at = new Date(time.dateTime);
    const recent = Math.abs(Date.now() - at) < 300 * 86400e3;
    time.textContent = (recent ? short : long).format(at);
    time.title = precise.format(at);
    time.removeAttribute("data-local");
  }
}

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const days = Math.floor(whole / 86400), hours = Math.floor((whole % 86400) / 3600);
  const minutes = Math.floor((whole % 3600) / 60), left = whole % 60;
  const two = (number) => String(number).padStart(2, "0");
  if (days) return interpolate(gettext("%(days)s d %(hours)s h"), { days, hours }, true);
  if (hours) return interpolate(gettext("%(hours)s h %(minutes)s min"), { hours, minutes: two(minutes) }, true);
  if (minutes) return interpolate(gettext("%(minutes)s min %(seconds)s s"), { minutes, seconds: two(left) }, true);
  return interpolate(gettext("%(seconds)s s"), { seconds: left }, true);
}

/** For narrow columns: 2-03:04, 1:02:03, 0:07. */
function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const days = Math.floor(whole / 86400), hours = Math.floor((whole % 86400) / 3600);
  const minutes = two(Math.floor((whole % 3600) / 60));
  const end = `${minutes}:${two(whole % 60)}`;
  if (days) return `${days}-${two(hours)}:${minutes}`;
  return hours ? `${hours}:${end}` : end.replace(/^0/, "");
}

function tick() {
  if (document.hidden) return;
  const now = Date.now();
  for (const place of document.querySelectorAll("[data-since], [data-until]")) {
    const { since, until } = place.dataset;
    const seconds = (since ? now - new Date(since) : new Date(until) - now) / 1000;
    const text = "clock" in place.dataset ? clock(seconds) : duration(seconds);
    if (place.textContent !== text) place.textContent = text;
  }
}

localize();
setInterval(tick, 1000);
document.addEventListener("sluice:times", localize);
document.addEventListener("htmx:afterSwap", localize);
