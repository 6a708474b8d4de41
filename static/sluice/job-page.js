// The job page: the live part renews itself, logs are opened side by side, results are listed.

import { followEvents } from "./live.js";

const gettext = window.gettext;
const interpolate = window.interpolate;
const page = document.querySelector("[data-job-page]");
const job = page.dataset.jobPage;
const board = document.querySelector("[data-log-board]");
const LIVE = ["QUEUED", "PENDING", "RUNNING"];
const GATHER_MS = 200;
const LOOK_MS = 5000; // while it runs: also keeps the engine reading the tasks' state
const MOST_LOGS = 6;

// --- the live part -----------------------------------------------------------------------------------

let timer = null;
const state = () => document.getElementById("job-live").dataset.state;
let actionsOf = state();

function changed() {
  timer ??= setTimeout(() => { timer = null; window.htmx.trigger(document.body, "job-changed"); }, GATHER_MS);
}
followEvents({ onEvents(events) { if (events.some((event) => event.job === job)) changed(); }, onReset: changed });
setInterval(() => { if (LIVE.includes(state()) && !document.hidden) changed(); }, LOOK_MS);

// What may be done depends on the state: fetch the buttons again when it changed.
document.addEventListener("htmx:afterSwap", async () => {
  if (state() === actionsOf) return;
  actionsOf = state();
  const answer = await fetch(window.location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.getElementById("job-actions").replaceWith(fresh.getElementById("job-actions"));
  const script = fresh.getElementById("script");
  if (script) document.getElementById("script").innerHTML = script.innerHTML;
});

// --- logs ------------------------------------------------------------------------------------------------

function openLog(role, index) {
  const there = board.querySelector(`log-view[data-role="${CSS.escape(role)}"][data-index="${index}"]`);
  if (there) { there.scrollIntoView({ block: "nearest" }); return; }
  if (board.children.length >= MOST_LOGS) board.firstElementChild.remove();
  const view = document.createElement("log-view");
  Object.assign(view.dataset, { job, role, index: String(index), attempt: board.dataset.attempt, closable: "" });
  board.append(view);
}

function showTab(name) { document.getElementById(`tab-${name}`).click(); }

document.addEventListener("click", (event) => {
  const log = event.target.closest("[data-open-log]");
  if (log) { showTab("logs"); openLog(log.dataset.role, log.dataset.index); }
  const opener = event.target.closest("[data-open-dialog]");
  if (opener) document.querySelector(opener.dataset.openDialog).showModal();
  const closer = event.target.closest("[data-close-dialog]");
  if (closer) closer.closest("dialog").close();
});
document.querySelector("[data-log-picker]").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const count = Number(form.role.selectedOptions[0].dataset.count);
  openLog(form.role.value, Math.min(Number(form.index.value) || 0, count - 1));
});
document.getElementById("tab-logs").addEventListener("shown.bs.tab", () => {
  if (!board.children.length) openLog(board.dataset.firstRole, 0);
});

// --- filter of the tasks ------------------------------------------------------------------------------------

document.addEventListener("input", (event) => {
  const rows = event.target.dataset?.filterRows;
  if (!rows) return;
  const words = event.target.value.toLowerCase();
  for (const row of document.querySelectorAll(`${rows} tr`)) row.hidden = !row.textContent.toLowerCase().includes(words);
});

// --- results --------------------------------------------------------------------------------------------------

document.getElementById("tab-results").addEventListener("shown.bs.tab", listFiles, { once: true });

async function listFiles() {
  const place = document.getElementById("results");
  const status = place.querySelector("[role=status]");
  const answer = await fetch(`/api/v1/jobs/${job}/files`, { headers: { Accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) { status.textContent = body.detail; return; }
  const files = body.files ?? body.results ?? [];
  if (!files.length) { status.textContent = gettext("There are no files."); return; }
  status.remove();
  const list = document.createElement("ul");
  list.className = "list-group";
  for (const file of files) {
    const row = document.createElement("li");
    row.className = "list-group-item d-flex justify-content-between";
    const link = document.createElement("a");
    link.href = file.url ?? `/api/v1/jobs/${job}/files/download?path=${encodeURIComponent(file.path)}`;
    link.textContent = file.path;
    link.download = "";
    const size = document.createElement("span");
    size.className = "text-secondary";
    size.textContent = interpolate(gettext("%(size)s bytes"), { size: file.size?.toLocaleString() ?? "–" }, true);
    row.append(link, size);
    list.append(row);
  }
  place.append(list);
}
