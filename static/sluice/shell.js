// The shell: toasts, dialogs (also the one that asks before something is lost), shortcuts, small form
// helpers. Listens on the document, so that it also holds for what is put into the page later.

const gettext = window.gettext ?? ((text) => text);

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
  // Errors stay until they are closed: someone may have looked elsewhere.
  if (box.dataset.level !== "error") setTimeout(close, 6000);
}

document.querySelectorAll("[data-toast]").forEach(autoDismiss);
// A server's answer may carry toasts: HX-Trigger: {"toast": {"text": …, "level": …}}
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level));
document.addEventListener("htmx:sendError", () => toast(gettext("Sluice does not answer. Try again in a moment."), "error"));
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status === 401 || event.detail.xhr.status === 403) window.location.reload();
  else toast(gettext("This did not work. Reload the page and try again."), "error");
});

// --- dialogs ---------------------------------------------------------------------------------------

/** Ask; resolves to true only for a clear yes. */
export function askConfirmation(text, action) {
  const dialog = document.getElementById("confirm-dialog");
  dialog.querySelector("[data-text]").textContent = text;
  if (action) dialog.querySelector("[data-action]").textContent = action;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open-dialog]");
  if (opener) document.querySelector(opener.dataset.openDialog)?.showModal();
  if (event.target.closest("[data-close-dialog]")) event.target.closest("dialog").close();
  // A click beside the box closes it, as people expect.
  if (event.target.matches("dialog.sluice-dialog") && !inside(event, event.target)) event.target.close();
});

function inside(event, dialog) {
  const box = dialog.getBoundingClientRect();
  const { clientX: x, clientY: y } = event;
  // Enter in a field makes a click at 0, 0.
  return (x === 0 && y === 0) || (x >= box.left && x <= box.right && y >= box.top && y <= box.bottom);
}

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
  if (form.method === "post" && !form.hasAttribute("hx-post")) {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
    setTimeout(() => delete form.dataset.sent, 5000);
  }
}, { capture: true });
// A page that comes back from the browser's cache may be sent again.
window.addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.querySelector(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.value ?? source.textContent);
    toast(gettext("Copied."), "success");
  } catch {
    // Without TLS browsers give no clipboard: choose the text, so that Ctrl-C does it.
    window.getSelection().selectAllChildren(source);
    source.select?.();
    toast(gettext("Press Ctrl-C to copy."));
  }
});

// --- shortcuts -----------------------------------------------------------------------------------

const GOTO = { h: "home", j: "jobs", t: "templates", c: "capacity" };
let waitingForGoKey = false;

function link(name) {
  document.querySelector(`[data-goto="${name}"]`)?.click();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable], .ace_editor, .log-screen, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (waitingForGoKey) {
    waitingForGoKey = false;
    if (GOTO[event.key]) link(GOTO[event.key]);
    return;
  }
  if (event.key === "g") {
    waitingForGoKey = true;
    setTimeout(() => { waitingForGoKey = false; }, 1500);
  } else if (event.key === "n") link("submit");
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (search) { event.preventDefault(); search.focus(); }
  } else if (event.key === "?") document.getElementById("shortcuts-dialog").showModal();
});
