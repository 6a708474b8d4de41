// The list of jobs: rows refresh themselves when events say so, new jobs appear, choosing several, saved views.

import { fetchText, followEvents } from "./live.js";
import { toast } from "./shell.js";

const { gettext, ngettext, interpolate } = window;
const list = document.getElementById("list");
const bar = document.getElementById("batch-bar");
const dialog = document.getElementById("batch-dialog");
const BATCH_DELAY_MS = 250; // events come in bursts; one request renews many rows
const LIST_REFRESH_MS = 2000; // the whole list anew at most so often
const NAMES_SHOWN = 8;

const formatCount = (one, many, count) => interpolate(ngettext(one, many, count), { count }, true);

// --- live rows ---------------------------------------------------------------------------------------

const changed = new Set();
const newJobs = new Set();
let timer = null;
let listTimer = null;
const firstPage = !new URLSearchParams(window.location.search).has("cursor");

followEvents({
  onEvents(events) {
    for (const event of events) {
      if (document.getElementById(`job-${event.job}`)) changed.add(event.job);
      else if (event.kind === "created") newJobs.add(event.job);
    }
    if (changed.size) timer ??= setTimeout(refreshRows, BATCH_DELAY_MS);
    if (newJobs.size) showNewJobs();
  },
  onReset: refreshList,
});

async function refreshRows() {
  timer = null;
  const ids = [...changed].slice(0, 200);
  ids.forEach((id) => changed.delete(id));
  try {
    const fresh = document.createElement("tbody");
    fresh.innerHTML = await fetchText(`${list.dataset.rowsUrl}?ids=${ids.join(",")}`);
    for (const id of ids) {
      const old = document.getElementById(`job-${id}`);
      const row = fresh.querySelector(`#job-${CSS.escape(id)}`);
      if (!old) continue;
      if (row) replaceRow(old, row); else old.remove();
    }
    document.dispatchEvent(new Event("sluice:times"));
    showSelection();
  } catch {
    ids.forEach((id) => changed.add(id));
    timer ??= setTimeout(refreshRows, 5000);
  }
}

/** What is ticked and what has the focus stays so. */
function replaceRow(old, row) {
  row.querySelector("input[type=checkbox]").checked = old.querySelector("input[type=checkbox]").checked;
  const focused = old.contains(document.activeElement) ? document.activeElement.tagName : "";
  old.replaceWith(row);
  if (focused) row.querySelector(focused === "A" ? "a" : "input")?.focus({ preventScroll: true });
}

/** On the first page of the newest, new jobs simply come in; elsewhere a button offers them. */
function showNewJobs() {
  if (firstPage) { listTimer ??= setTimeout(refreshList, LIST_REFRESH_MS); return; }
  const button = document.querySelector("[data-new-jobs]");
  button.textContent = formatCount("%(count)s new job: show it", "%(count)s new jobs: show them", newJobs.size);
  button.hidden = false;
  button.onclick = () => { const here = new URL(window.location); here.searchParams.delete("cursor"); window.location = here; };
}

async function refreshList() {
  listTimer = null;
  // Not while someone walks through the rows with the keyboard.
  if (list.contains(document.activeElement)) { listTimer = setTimeout(refreshList, LIST_REFRESH_MS); return; }
  newJobs.clear();
  try {
    const html = await fetchText(window.location.href);
    const ticked = new Set([...selectedBoxes()].map((box) => box.value));
    list.innerHTML = html;
    for (const box of list.querySelectorAll("tbody input[name=id]")) box.checked = ticked.has(box.value);
    document.dispatchEvent(new Event("sluice:times"));
    showSelection();
  } catch { listTimer ??= setTimeout(refreshList, 5000); }
}

// --- choosing several ------------------------------------------------------------------------------------

function selectedBoxes() { return list.querySelectorAll("tbody input[name=id]:checked"); }

function showSelection() {
  const count = selectedBoxes().length;
  const all = list.querySelector("[data-select-all]");
  if (all) {
    const boxes = list.querySelectorAll("tbody input[name=id]").length;
    all.checked = count > 0 && count === boxes;
    all.indeterminate = count > 0 && count < boxes;
  }
  bar.hidden = count === 0;
  bar.querySelector("[data-count]").textContent = formatCount("%(count)s job chosen", "%(count)s jobs chosen", count);
}
list.addEventListener("change", (event) => {
  if (event.target.matches("[data-select-all]")) {
    list.querySelectorAll("tbody input[name=id]").forEach((box) => { box.checked = event.target.checked; });
  }
  showSelection();
});
bar.addEventListener("click", (event) => {
  const action = event.target.closest("[data-batch]")?.dataset.batch;
  if (action) confirmBatch(action);
  if (event.target.closest("[data-select-none]")) {
    selectedBoxes().forEach((box) => { box.checked = false; });
    showSelection();
  }
});

/** Say what will happen, to which jobs, before it does. */
function confirmBatch(action) {
  const rows = [...selectedBoxes()].map((box) => box.closest("tr"));
  const live = rows.filter((row) => !("ended" in row.dataset));
  const ended = rows.length - live.length;
  const deleting = action === "delete";
  dialog.querySelector("[data-action]").value = action;
  dialog.querySelector("[data-title]").textContent = deleting
    ? formatCount("Delete %(count)s job?", "Delete %(count)s jobs?", rows.length)
    : formatCount("Stop %(count)s job?", "Stop %(count)s jobs?", rows.length);
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
  const words = [];
  if (live) words.push(formatCount("%(count)s job that waits or runs is stopped; its tasks get a moment to end by themselves, and its files stay.", "%(count)s jobs that wait or run are stopped; their tasks get a moment to end by themselves, and their files stay.", live));
  if (ended) words.push(formatCount("%(count)s has already ended: nothing happens to it.", "%(count)s have already ended: nothing happens to them.", ended));
  return words;
}

function deleteMessages(live, ended) {
  const words = [];
  if (ended) words.push(formatCount("%(count)s ended job disappears from all lists, with its history.", "%(count)s ended jobs disappear from all lists, with their history.", ended));
  if (live) words.push(formatCount("%(count)s has not ended and is left alone, unless you choose otherwise here:", "%(count)s have not ended and are left alone, unless you choose otherwise here:", live));
  return words;
}

function showNames(rows) {
  const names = rows.slice(0, NAMES_SHOWN).map((row) => row.querySelector(".cell-name a").textContent);
  if (rows.length > NAMES_SHOWN) names.push(formatCount("and %(count)s more", "and %(count)s more", rows.length - NAMES_SHOWN));
  dialog.querySelector("[data-names]").replaceChildren(...names.map((name) => {
    const item = document.createElement("li");
    item.textContent = name;
    return item;
  }));
}
showSelection();

// --- saved views: kept in this browser -------------------------------------------------------------------

const VIEWS_KEY = `sluice.views.${document.querySelector("[data-user]")?.dataset.user}`;
const views = document.querySelector("[data-saved-views]");

function readViews() { try { return JSON.parse(localStorage.getItem(VIEWS_KEY)) ?? []; } catch { return []; } }

function showViews() {
  views.hidden = false;
  views.querySelector("[data-views]").replaceChildren(...readViews().map((view) => {
    const place = document.createElement("span");
    place.className = "saved-view";
    const link = document.createElement("a");
    link.href = String(view.query).startsWith("?") ? view.query : "?";
    link.textContent = view.name;
    if (link.search === window.location.search) link.setAttribute("aria-current", "true");
    const forget = document.createElement("button");
    forget.type = "button";
    forget.textContent = "×";
    forget.setAttribute("aria-label", interpolate(gettext("Forget the view %(name)s"), { name: view.name }, true));
    forget.addEventListener("click", () => {
      localStorage.setItem(VIEWS_KEY, JSON.stringify(readViews().filter((other) => other.name !== view.name)));
      showViews();
    });
    place.append(link, forget);
    return place;
  }));
}
document.querySelector("[data-view-form]").addEventListener("submit", (event) => {
  const name = event.target.querySelector("input").value.trim();
  if (!name) return;
  const query = window.location.search || "?";
  localStorage.setItem(VIEWS_KEY, JSON.stringify([...readViews().filter((view) => view.name !== name), { name, query }]));
  event.target.reset();
  showViews();
  toast(gettext("The view is saved in this browser."), "success");
});
showViews();
