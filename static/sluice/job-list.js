// The list of jobs: refreshes rows after events, shows new jobs, acts on selected jobs, keeps saved views.

import { toast } from "./dialogs.js";
import { gettext, interpolate, ngettext } from "./i18n.js";
import { fetchFragment, followEvents } from "./live.js";
import { RowSelection } from "./selection.js";
import { localizeTimes } from "./times.js";

const list = document.getElementById("list");
const bar = document.getElementById("batch-bar");
const dialog = document.getElementById("batch-dialog");
const BATCH_DELAY_MS = 250; // events within this time cause one request
const LIST_REFRESH_MS = 2000; // minimum time between two reloads of the list
const RETRY_MS = 5000; // delay after a failed request
const MAX_NAMES_SHOWN = 8;
const MAX_ROWS_PER_REQUEST = 200; // the limit of the server

const selection = new RowSelection(list, bar, (count) => interpolate(ngettext("%(count)s job selected", "%(count)s jobs selected", count), { count }));

// --- live rows ---------------------------------------------------------------------------------------

const changedJobs = new Set();
const newJobs = new Set();
let rowsTimer = null;
let listTimer = null;
const isFirstPage = !new URLSearchParams(window.location.search).has("cursor");

followEvents({
  onEvents(events) {
    for (const event of events) {
      if (document.getElementById(`job-${event.job}`)) changedJobs.add(event.job);
      else if (event.kind === "created") newJobs.add(event.job);
    }
    if (changedJobs.size) rowsTimer ??= setTimeout(refreshRows, BATCH_DELAY_MS);
    if (newJobs.size) showNewJobs();
  },
  onReset: refreshList,
});

async function refreshRows() {
  rowsTimer = null;
  const ids = [...changedJobs].slice(0, MAX_ROWS_PER_REQUEST);
  ids.forEach((id) => changedJobs.delete(id));
  try {
    const fresh = document.createElement("tbody");
    fresh.innerHTML = await fetchFragment(`${list.dataset.rowsUrl}?ids=${ids.join(",")}`);
    for (const id of ids) {
      const old = document.getElementById(`job-${id}`);
      const row = fresh.querySelector(`#job-${CSS.escape(id)}`);
      if (!old) continue;
      if (row) replaceRow(old, row); else old.remove();
    }
    localizeTimes();
    selection.update();
  } catch {
    ids.forEach((id) => changedJobs.add(id));
    rowsTimer ??= setTimeout(refreshRows, RETRY_MS);
  }
}

/** Replace a row; keeps the state of its checkbox and the focus. */
function replaceRow(old, row) {
  row.querySelector("input[type=checkbox]").checked = old.querySelector("input[type=checkbox]").checked;
  const focused = old.contains(document.activeElement) ? document.activeElement.tagName : "";
  old.replaceWith(row);
  if (focused) row.querySelector(focused === "A" ? "a" : "input")?.focus({ preventScroll: true });
}

/** On the first page, reload the list with the new jobs; on other pages, show a button that opens the first page. */
function showNewJobs() {
  if (isFirstPage) { listTimer ??= setTimeout(refreshList, LIST_REFRESH_MS); return; }
  const button = document.querySelector("[data-new-jobs]");
  button.textContent = interpolate(ngettext("Show %(count)s new job", "Show %(count)s new jobs", newJobs.size), { count: newJobs.size });
  button.hidden = false;
  button.onclick = () => { const here = new URL(window.location); here.searchParams.delete("cursor"); window.location = here; };
}

async function refreshList() {
  listTimer = null;
  // Wait while an element of the list has the keyboard focus: replacing it would lose the focus.
  if (list.contains(document.activeElement)) { listTimer = setTimeout(refreshList, LIST_REFRESH_MS); return; }
  newJobs.clear();
  try {
    const html = await fetchFragment(window.location.href);
    const { ids } = selection;
    list.innerHTML = html;
    selection.restore(ids);
    localizeTimes();
  } catch { listTimer ??= setTimeout(refreshList, RETRY_MS); }
}

// --- selection ----------------------------------------------------------------------------------------

bar.addEventListener("click", (event) => {
  const action = event.target.closest("[data-batch]")?.dataset.batch;
  if (action) confirmBatch(action);
});

/** Open the dialog that shows which jobs the action affects and asks for confirmation. */
function confirmBatch(action) {
  const rows = selection.selected.map((box) => box.closest("tr"));
  const live = rows.filter((row) => !("ended" in row.dataset));
  const ended = rows.length - live.length;
  const deleting = action === "delete";
  dialog.querySelector("[data-action]").value = action;
  dialog.querySelector("[data-title]").textContent = deleting
    ? interpolate(ngettext("Delete %(count)s job?", "Delete %(count)s jobs?", rows.length), { count: rows.length })
    : interpolate(ngettext("Stop %(count)s job?", "Stop %(count)s jobs?", rows.length), { count: rows.length });
  dialog.querySelector("[data-text]").textContent = (deleting ? deleteMessages(live.length, ended) : stopMessages(live.length, ended)).join(" ");
  showNames(deleting ? rows : live);
  for (const option of dialog.querySelectorAll("[data-for]")) {
    option.hidden = option.dataset.for !== action || ("ifLive" in option.dataset && !live.length);
    option.querySelector("input").checked = false;
  }
  const go = dialog.querySelector("[data-go]");
  go.textContent = deleting ? gettext("Delete") : gettext("Stop");
  go.disabled = !deleting && !live.length;
  dialog.showModal();
}

function stopMessages(live, ended) {
  const messages = [];
  if (live) messages.push(interpolate(ngettext("%(count)s unfinished job will be stopped. Its tasks receive SIGTERM first; its files stay.", "%(count)s unfinished jobs will be stopped. Their tasks receive SIGTERM first; their files stay.", live), { count: live }));
  if (ended) messages.push(interpolate(ngettext("%(count)s job has already ended and is not changed.", "%(count)s jobs have already ended and are not changed.", ended), { count: ended }));
  return messages;
}

function deleteMessages(live, ended) {
  const messages = [];
  if (ended) messages.push(interpolate(ngettext("%(count)s ended job and its history will be deleted.", "%(count)s ended jobs and their history will be deleted.", ended), { count: ended }));
  if (live) messages.push(interpolate(ngettext("%(count)s unfinished job is kept unless you select the option below.", "%(count)s unfinished jobs are kept unless you select the option below.", live), { count: live }));
  return messages;
}

function showNames(rows) {
  const names = rows.slice(0, MAX_NAMES_SHOWN).map((row) => row.querySelector(".cell-name a").textContent);
  if (rows.length > MAX_NAMES_SHOWN) names.push(interpolate(ngettext("and %(count)s more", "and %(count)s more", rows.length - MAX_NAMES_SHOWN), { count: rows.length - MAX_NAMES_SHOWN }));
  dialog.querySelector("[data-names]").replaceChildren(...names.map((name) => {
    const item = document.createElement("li");
    item.textContent = name;
    return item;
  }));
}

// --- saved views, in the browser's local storage -------------------------------------------------------------------

const VIEWS_STORAGE_KEY = `sluice.views.${document.querySelector("[data-user]")?.dataset.user}`;
const views = document.querySelector("[data-saved-views]");

function readViews() { try { return JSON.parse(localStorage.getItem(VIEWS_STORAGE_KEY)) ?? []; } catch { return []; } }

function showViews() {
  views.hidden = false;
  views.querySelector("[data-views]").replaceChildren(...readViews().map((view) => {
    const item = document.createElement("span");
    item.className = "saved-view";
    const link = document.createElement("a");
    link.href = String(view.query).startsWith("?") ? view.query : "?";
    link.textContent = view.name;
    if (link.search === window.location.search) link.setAttribute("aria-current", "true");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", interpolate(gettext("Remove the view %(name)s"), { name: view.name }));
    remove.addEventListener("click", () => {
      localStorage.setItem(VIEWS_STORAGE_KEY, JSON.stringify(readViews().filter((other) => other.name !== view.name)));
      showViews();
    });
    item.append(link, remove);
    return item;
  }));
}
document.querySelector("[data-view-form]").addEventListener("submit", (event) => {
  const name = event.target.querySelector("input").value.trim();
  if (!name) return;
  const query = window.location.search || "?";
  localStorage.setItem(VIEWS_STORAGE_KEY, JSON.stringify([...readViews().filter((view) => view.name !== name), { name, query }]));
  event.target.reset();
  showViews();
  toast(gettext("View saved in this browser."), "success");
});
showViews();
