// The template page: replaces the text field by an editor, adds and removes rows of parameters, and lets the server
// check the template while the person types.

import { gettext } from "./i18n.js";
import { openEditor } from "./job-editor.js";

const CHECK_DELAY_MS = 500;
const CHECK_RETRY_MS = 4000;
const page = JSON.parse(document.getElementById("template-page").textContent);
const form = document.getElementById("template-form");
const textField = document.getElementById("t-file");
const status = document.querySelector("[data-check-status]");
const rows = document.querySelector("[data-parameters]");
const { readOnly } = textField;
let editor = null;
let timer = null;
let serial = 0; // makes the ids of added rows unique
let hasUnsavedChanges = false;

const place = document.createElement("div");
place.className = "template-editor";
textField.before(place);
openEditor(place, {
  ace: page.ace, schema: page.schema, text: textField.value, readOnly, lines: [12, 45],
  format: textField.value.trimStart().startsWith("{") ? "json" : "yaml",
  onChange(text) { textField.value = text; scheduleCheck(); },
}).then((opened) => {
  editor = opened;
  textField.hidden = true;
  editor.setProblems(page.problems);
}, () => place.remove()); // the editor's scripts cannot be loaded: the text field stays

function scheduleCheck() {
  hasUnsavedChanges = true;
  clearTimeout(timer);
  timer = setTimeout(check, CHECK_DELAY_MS);
}

async function check() {
  try {
    const response = await fetch(page.check, { method: "POST", body: new FormData(form) });
    if (!response.ok) {
      status.textContent = (await response.json().catch(() => ({}))).detail ?? "";
      if (response.status === 429) timer = setTimeout(check, CHECK_RETRY_MS);
      return;
    }
    const { problems } = await response.json();
    editor?.setProblems(problems);
    status.textContent = problems.length
      ? `${problems[0].path ? `${problems[0].path}: ` : ""}${problems[0].message}`
      : gettext("The job file is valid.");
  } catch {
    status.textContent = gettext("No response from Sluice. Try again later.");
  }
}

function showChoices(row) {
  row.querySelector("[data-choices]").hidden = row.querySelector("[name=parameter_kind]").value !== "choice";
}
rows.querySelectorAll("[data-parameter]").forEach(showChoices);

form.addEventListener("input", (event) => {
  const row = event.target.closest("[data-parameter]");
  if (row) { showChoices(row); scheduleCheck(); }
  hasUnsavedChanges = true;
});

form.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  const row = button?.closest("[data-parameter]");
  if (button?.matches("[data-add-parameter]")) addRow();
  else if (button?.matches("[data-remove-parameter]")) { row.remove(); scheduleCheck(); document.querySelector("[data-add-parameter]").focus(); }
  else if (button?.matches("[data-insert-parameter]")) insertReference(row);
});

function addRow() {
  const copy = document.getElementById("parameter-new").content.cloneNode(true);
  serial += 1;
  for (const attribute of ["id", "for"]) for (const element of copy.querySelectorAll(`[${attribute}]`)) element.setAttribute(attribute, `${element.getAttribute(attribute)}-${serial}`);
  rows.append(copy);
  const row = rows.lastElementChild;
  showChoices(row);
  row.querySelector("[name=parameter_name]").focus();
}

/** Insert the row's parameter at the editor's cursor. */
function insertReference(row) {
  const name = row.querySelector("[name=parameter_name]").value.trim();
  if (!name) { row.querySelector("[name=parameter_name]").focus(); return; }
  editor?.insert(`<% $parameters.${name} %>`);
}

form.addEventListener("submit", () => { hasUnsavedChanges = false; });
window.addEventListener("beforeunload", (event) => { if (hasUnsavedChanges && !readOnly) event.preventDefault(); });
document.querySelector("[data-problem-box]")?.focus();
if (readOnly) status.textContent = gettext("read-only");
