// The job page: refreshes its live fragments, selects tabs, filters tasks, shows logs side by side and the files.

import { FileBrowser } from "./file-browser.js";
import { gettext } from "./i18n.js";
import { followEvents, createFragmentRefresher } from "./live.js";

const page = document.querySelector("[data-job-page]");
const jobId = page.dataset.jobPage;
// Interval of requests while the job has not ended. Each request also marks the job as watched, so that the engine reads
// the states of its tasks.
const REFRESH_INTERVAL_MS = 5000;
const FIRST_REFRESH_MS = 2500;
const MAX_OPEN_LOGS = 6;
const MAX_LOG_NAMES = 2000;

// --- live fragments ----------------------------------------------------------------------------------

const isLive = () => !("ended" in document.getElementById("job-state").dataset);
let hasScript = Boolean(document.getElementById("script-text"));

const refresh = createFragmentRefresher(page.dataset.liveUrl, { everyMs: 400, onChange() { filterTasks(); fetchScript(); } });
followEvents({ onEvents(events) { if (events.some((event) => event.job === jobId)) refresh(); }, onReset: refresh });
// The first request marks the job as watched; soon after it the engine has read the states of its tasks.
setTimeout(() => { if (isLive()) refresh(); }, FIRST_REFRESH_MS);
setInterval(() => { if (isLive() && !document.hidden) refresh(); }, REFRESH_INTERVAL_MS);

/** Fetch the batch script once, when the first attempt exists. */
async function fetchScript() {
  if (hasScript || document.getElementById("job-state").dataset.state === "QUEUED") return;
  hasScript = true;
  const response = await fetch(window.location.href);
  if (!response.ok) { hasScript = false; return; }
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("job-script");
  if (fresh) document.getElementById("job-script").replaceWith(fresh);
}

// --- tabs, selected by the URL's fragment: #logs ----------------------------------------------------------------------

function showTab(name) { document.getElementById(`tab-${name}`)?.click(); }

for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("shown.bs.tab", () => {
    for (const other of document.querySelectorAll("[role=tab]")) other.tabIndex = other === tab ? 0 : -1;
    const name = tab.id.replace("tab-", "");
    window.history.replaceState(null, "", name === "overview" ? window.location.pathname + window.location.search : `#${name}`);
  });
}
window.addEventListener("load", () => { if (window.location.hash) showTab(window.location.hash.slice(1)); });

// --- filter of the tasks ---------------------------------------------------------------------------------

const textFilter = document.getElementById("task-filter");
const stateFilter = document.getElementById("task-state");
let isFiltered = false;

function filterTasks() {
  const text = textFilter.value.trim().toLowerCase();
  const state = stateFilter.value;
  if (!text && !state && !isFiltered) return;
  isFiltered = Boolean(text || state);
  for (const row of document.querySelectorAll("#task-rows tr")) {
    row.hidden = Boolean((state && row.dataset.state !== state) || (text && !row.textContent.toLowerCase().includes(text)));
  }
}
textFilter.addEventListener("input", filterTasks);
stateFilter.addEventListener("change", filterTasks);

// --- logs ------------------------------------------------------------------------------------------------

const board = document.querySelector("[data-log-board]");
const roles = JSON.parse(document.getElementById("roles").textContent);
const picker = document.querySelector("[data-log-picker]");

function fillPicker() {
  const names = [];
  for (const role of roles) for (let index = 0; index < role.count && names.length < MAX_LOG_NAMES; index += 1) names.push([`${role.name}-${index}`, role.title]);
  names.push(["batch", ""]);
  document.getElementById("log-names").replaceChildren(...names.map(([name, title]) => {
    const option = document.createElement("option");
    option.value = name;
    option.label = title ? `${name} ${title}` : name;
    return option;
  }));
}

function openLog(role, index) {
  const opened = [...board.children].find((view) => view.dataset.role === role && view.dataset.index === String(index));
  if (opened) { opened.scrollIntoView({ block: "nearest" }); return; }
  if (board.children.length >= MAX_OPEN_LOGS) board.firstElementChild.remove();
  const view = document.createElement("log-view");
  const title = roles.find(({ name }) => name === role)?.title ?? "";
  Object.assign(view.dataset, { job: jobId, role, title, index: String(index), attempt: board.dataset.attempt, closable: "" });
  board.append(view);
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open-log]");
  if (!opener) return;
  showTab("logs");
  openLog(opener.dataset.role, Number(opener.dataset.index));
});
picker.addEventListener("submit", (event) => {
  event.preventDefault();
  const field = picker.elements.log;
  const found = /^(.*)-(\d+)$/.exec(field.value.trim());
  const role = roles.find(({ name }) => name === found?.[1]);
  if (field.value.trim() === "batch") openLog("batch", 0);
  else if (role && Number(found[2]) < role.count) openLog(role.name, Number(found[2]));
  else { field.setCustomValidity(gettext("No such task. Select one from the list.")); field.reportValidity(); return; }
  field.value = "";
});
picker.elements.log.addEventListener("input", (event) => event.target.setCustomValidity(""));
document.getElementById("tab-logs").addEventListener("shown.bs.tab", () => {
  if (!document.getElementById("log-names").children.length) fillPicker();
  // Wait for the click handler of [data-open-log]: it shows this tab first and then opens its log.
  setTimeout(() => { if (!board.children.length) openLog(roles[0].name, 0); });
});

// --- job file: YAML or JSON --------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const format = event.target.closest("[data-show-format]")?.dataset.showFormat;
  if (!format) return;
  for (const text of document.querySelectorAll("[data-format]")) text.hidden = text.dataset.format !== format;
  for (const button of document.querySelectorAll("[data-show-format]")) button.setAttribute("aria-pressed", String(button.dataset.showFormat === format));
});

// --- files: listed when their tab is opened for the first time ---------------------------------------------

const fileBrowser = new FileBrowser(document.getElementById("results"), jobId, board.dataset.attempt);
document.getElementById("tab-results").addEventListener("shown.bs.tab", () => fileBrowser.load(), { once: true });
