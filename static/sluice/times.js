// Times in the reader's own zone and language, and durations that go on counting.

const language = document.documentElement.lang || undefined;
const precise = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(language, { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const long = new Intl.DateTimeFormat(language, { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
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

function tick() {
  for (const place of document.querySelectorAll("[data-since]")) {
    place.textContent = duration((Date.now() - new Date(place.dataset.since)) / 1000);
  }
}

localize();
setInterval(tick, 1000);
document.addEventListener("sluice:times", localize);
document.addEventListener("htmx:afterSwap", localize);
