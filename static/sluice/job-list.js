// The list of jobs: rows renew themselves when events say so, choosing several, saved views.

import { followEvents } from "./live.js";
import { toast } from "./shell.js";

const gettext = window.gettext;
const interpolate = window.interpolate;
const list = document.getElementById("list");
const batch = document.getElementById("batch");
const GATHER_MS = 250; // events come in bursts; one request renews many rows

// --- live rows ---------------------------------------------------------------------------------------

const changed = new Set();
const unknown = new Set();
let timer = null;

followEvents({
  onEvents(events) {
    for (const event of events) {
      if (document.getElementById(`job-${event.job}`)) changed.add(event.job);
      else if (event.kind === "created") unknown.add(event.job);
    }
    timer ??= setTimeout(renew, GATHER_MS);
  },
});

async function renew() {
  timer = null;
  offerNew();
  if (!changed.size) return;
  const ids = [...changed].slice(0, 200);
  ids.forEach((id) => changed.delete(id));
  try {
    const answer = await fetch(`${list.dataset.rowsAddress}?ids=${ids.join(",")}`);
    if (!answer.ok) return;
    const fresh = document.createElement("tbody");
    fresh.innerHTML = await answer.text();
    for (const id of ids) {
      const old = document.getElementById(`job-${id}`);
      const row = fresh.querySelector(`#job-${CSS.escape(id)}`);
      if (!old) continue;
      if (!row) { old.remove(); continue; }
      row.querySelector("input[type=checkbox]").checked = old.querySelector("input[type=checkbox]").checked;
      old.replaceWith(row);
    }
    document.dispatchEvent(new Event("sluice:times"));
  } catch {
    ids.forEach((id) => changed.add(id));
    timer ??= setTimeout(renew, 5000);
  }
}

function offerNew() {
  const button = document.querySelector("[data-new-jobs]");
  if (!unknown.size || !button) return;
  button.textContent = interpolate(window.ngettext("%(count)s new job: show it", "%(count)s new jobs: show them", unknown.size), { count: unknown.size }, true);
  button.hidden = false;
  button.onclick = () => window.location.reload();
}

// --- choosing several ------------------------------------------------------------------------------------

function chosen() { return list.querySelectorAll("tbody input[name=id]:checked"); }

function showChoice() {
  const count = chosen().length;
  batch.hidden = count === 0;
  batch.querySelector("[data-count]").textContent = interpolate(window.ngettext("%(count)s chosen", "%(count)s chosen", count), { count }, true);
}
list.addEventListener("change", (event) => {
  if (event.target.matches("[data-choose-all]")) {
    list.querySelectorAll("tbody input[name=id]").forEach((box) => { box.checked = event.target.checked; });
  }
  showChoice();
});
showChoice();

// --- saved views: kept in this browser -------------------------------------------------------------------

const VIEWS_KEY = `sluice.views.${document.querySelector("[data-user]")?.dataset.user}`;
const views = document.querySelector("[data-saved-views]");

function readViews() { try { return JSON.parse(localStorage.getItem(VIEWS_KEY)) ?? []; } catch { return []; } }

function showViews() {
  views.hidden = false;
  views.querySelector("[data-views]").replaceChildren(...readViews().map((view) => {
    const place = document.createElement("span");
    place.className = "btn-group me-2";
    const link = document.createElement("a");
    link.className = "btn btn-sm";
    link.href = view.query;
    link.textContent = view.name;
    const forget = document.createElement("button");
    forget.type = "button";
    forget.className = "btn btn-sm btn-icon";
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
views?.querySelector("[data-save-view]").addEventListener("click", () => {
  const name = window.prompt(gettext("Name of this view"))?.trim().slice(0, 60);
  if (!name) return;
  const query = window.location.search || "?";
  localStorage.setItem(VIEWS_KEY, JSON.stringify([...readViews().filter((view) => view.name !== name), { name, query }]));
  showViews();
  toast(gettext("The view is saved in this browser."), "success");
});
if (views) showViews();
