// For all pages: toasts, the confirmation dialog, and buttons that open and close dialogs.
// The click handlers are on the document, so that they also work for fragments that are inserted later.

import { gettext } from "./i18n.js";

const TOAST_MS = 6000;

export function toast(text, level = "info") {
  const box = document.getElementById("toast-template").content.firstElementChild.cloneNode(true);
  box.dataset.level = level;
  box.querySelector(".toast-body").textContent = text;
  document.getElementById("toasts").append(box);
  autoDismiss(box);
}

function autoDismiss(box) {
  const close = () => box.remove();
  box.querySelector("[data-close-toast]").addEventListener("click", close);
  // A toast with an error stays until the person closes it.
  if (box.dataset.level !== "error") setTimeout(close, TOAST_MS);
}

/** Show the confirmation dialog; resolves to true only if the action was confirmed. */
export function askConfirmation(text, action = gettext("Confirm")) {
  const dialog = document.getElementById("confirm-dialog");
  dialog.querySelector("[data-text]").textContent = text;
  dialog.querySelector("[data-action]").textContent = action;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Show why a dialog's request was rejected; an empty text hides the message. */
export function showDialogError(dialog, text) {
  const place = dialog.querySelector("[data-refused]");
  place.textContent = text;
  place.hidden = !text;
}

function isInside(event, dialog) {
  const box = dialog.getBoundingClientRect();
  const { clientX: x, clientY: y } = event;
  // The Enter key in a field causes a click event at position 0, 0, which is not outside.
  return (x === 0 && y === 0) || (x >= box.left && x <= box.right && y >= box.top && y <= box.bottom);
}

document.querySelectorAll("[data-toast]").forEach(autoDismiss);
document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open-dialog]");
  if (opener) document.querySelector(opener.dataset.openDialog)?.showModal();
  if (event.target.closest("[data-close-dialog]")) event.target.closest("dialog").close();
  // A click on the backdrop, outside the dialog's box, closes the dialog.
  if (event.target.matches("dialog.sluice-dialog") && !isInside(event, event.target)) event.target.close();
});
