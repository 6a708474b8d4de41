// The sidebar of the submit page: status, problems, plan, warnings and batch script of the last check.

import { dateTime, duration, hours, memory } from "./format.js";
import { gettext, interpolate, ngettext } from "./i18n.js";

export function fillList(place, lines) {
  place.replaceChildren(...lines.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  place.hidden = !lines.length;
}

export function formatStart(preview) {
  if (preview.startsNow) return gettext("now");
  if (preview.expectedStart) return interpolate(gettext("by %(time)s"), { time: dateTime(preview.expectedStart) });
  return gettext("when resources are free");
}

export function formatCost(preview) {
  const parts = [];
  if (preview.machineHours !== null) parts.push(interpolate(gettext("%(hours)s machine hours"), { hours: hours(preview.machineHours) }));
  else if (preview.nodeHours !== null) parts.push(interpolate(gettext("%(hours)s node hours, no price"), { hours: hours(preview.nodeHours) }));
  if (preview.gpuHours) parts.push(interpolate(gettext("%(hours)s GPU hours"), { hours: hours(preview.gpuHours) }));
  return parts.join(" · ") || "–";
}

function formatTotals(totals) {
  const tasks = interpolate(ngettext("%(count)s task", "%(count)s tasks", totals.tasks), { count: totals.tasks });
  return [tasks, `${totals.cpus} CPU`, memory(totals.memory), ...(totals.gpus ? [`${totals.gpus} GPU`] : [])].join(" · ");
}

export class Sidebar {
  /** `labelFor(problem)` returns the label of a problem's field; `onProblem(problem)` is called to open that field. */
  constructor(root, { labelFor, onProblem }) {
    Object.assign(this, { root, labelFor, onProblem });
  }

  find(selector) { return this.root.querySelector(selector); }

  /** `state` is busy, good, wait or bad. */
  setStatus(state, text) {
    const place = this.find("[data-status]");
    place.dataset.state = state;
    place.querySelector("[data-text]").textContent = text;
  }

  show({ preview, problems, warnings = [] }) {
    const place = this.find("[data-problems]");
    place.hidden = !problems.length;
    place.replaceChildren(...problems.map((problem) => this.createProblemItem(problem)));
    this.showStatus(preview, problems);
    this.find("[data-warnings-now]").hidden = !warnings.length;
    fillList(this.find("[data-warnings-now] [data-list]"), warnings.map((warning) => (warning.path ? `${warning.path}: ${warning.message}` : warning.message)));
    this.find("[data-plan]").hidden = !preview;
    this.find("[data-script-box]").hidden = !preview?.script;
    if (preview) this.showPlan(preview);
  }

  showStatus(preview, problems) {
    if (problems.length) this.setStatus("bad", interpolate(ngettext("%(count)s problem", "%(count)s problems", problems.length), { count: problems.length }));
    else if (preview?.startsNow) this.setStatus("good", gettext("Can start now."));
    else this.setStatus("wait", [gettext("Will wait in the queue."), ...(preview?.obstacles ?? [])].join(" "));
  }

  showPlan(preview) {
    fillList(this.find("[data-lines]"), preview.lines);
    fillList(this.find("[data-notes]"), preview.notes);
    this.find("[data-plan] [data-start]").textContent = formatStart(preview);
    this.find("[data-plan] [data-limit]").textContent = preview.timeLimit === null ? "–" : duration(preview.timeLimit);
    this.find("[data-plan] [data-cost]").textContent = formatCost(preview);
    this.find("[data-totals]").textContent = formatTotals(preview.totals);
    this.find("[data-script]").textContent = preview.script;
  }

  createProblemItem(problem) {
    const item = document.createElement("li");
    const button = Object.assign(document.createElement("button"), { type: "button", className: "submit-problem" });
    const label = Object.assign(document.createElement("strong"), { textContent: this.labelFor(problem) || problem.path || gettext("job file") });
    button.append(label, " ", problem.message);
    button.addEventListener("click", () => this.onProblem(problem));
    item.append(button);
    return item;
  }
}
