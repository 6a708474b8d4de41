// For all pages: forms with a confirmation, protection against double submission, copy buttons, keyboard shortcuts.

import { askConfirmation, toast } from "./dialogs.js";
import { gettext } from "./i18n.js";

// For this time after a form was sent, it cannot be sent again.
const DOUBLE_SUBMIT_BLOCK_MS = 5000;
const SHORTCUT_WAIT_MS = 1500;

// --- forms: data-confirm, data-submit-on-change -----------------------------------------------------

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const button = event.submitter;
  const text = button?.dataset.confirm ?? form.dataset.confirm;
  if (text && form.dataset.confirmed !== "yes") {
    event.preventDefault();
    event.stopPropagation();
    if (await askConfirmation(text, button?.dataset.confirmAction ?? form.dataset.confirmAction)) {
      form.dataset.confirmed = "yes";
      form.requestSubmit(button);
      delete form.dataset.confirmed;
    }
    return;
  }
  // A second click on the same button must not send the form twice.
  if (form.method === "post") {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
    setTimeout(() => delete form.dataset.sent, DOUBLE_SUBMIT_BLOCK_MS);
  }
}, { capture: true });
// Forms of a page that the browser restores from its cache can be sent again.
window.addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
});

// --- copy buttons: data-copy="selector" --------------------------------------------------------------

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.querySelector(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.value ?? source.textContent);
    toast(gettext("Copied."), "success");
  } catch {
    // Browsers provide no clipboard without TLS: select the text, so that the person can press Ctrl-C.
    window.getSelection().selectAllChildren(source);
    source.select?.();
    toast(gettext("Press Ctrl-C to copy."));
  }
});

// --- keyboard shortcuts: g and a letter opens a page, n submits a job, / searches, ? lists the shortcuts ----

const PAGE_KEYS = { h: "home", j: "jobs", t: "templates", c: "capacity" };
let waitingForPageKey = false;

function openPage(name) {
  document.querySelector(`[data-goto="${name}"]`)?.click();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable], .ace_editor, .log-screen, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (waitingForPageKey) {
    waitingForPageKey = false;
    if (PAGE_KEYS[event.key]) openPage(PAGE_KEYS[event.key]);
    return;
  }
  if (event.key === "g") {
    waitingForPageKey = true;
    setTimeout(() => { waitingForPageKey = false; }, SHORTCUT_WAIT_MS);
  } else if (event.key === "n") openPage("submit");
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (search) { event.preventDefault(); search.focus(); }
  } else if (event.key === "?") document.getElementById("shortcuts-dialog").showModal();
});
