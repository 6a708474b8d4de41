// The shell: toasts, the dialog that asks before something is lost, shortcuts, small form helpers.
// Listens on the document, so that it also holds for what htmx puts in later.

const gettext = window.gettext ?? ((text) => text);

export function toast(text, level = "info") {
  const place = document.getElementById("toasts");
  const box = document.createElement("div");
  box.className = "toast show";
  box.dataset.toast = "";
  box.dataset.level = level;
  const body = document.createElement("div");
  body.className = "toast-body";
  body.textContent = text;
  box.append(body);
  place.append(box);
  fade(box);
}

function fade(box) {
  // Errors stay until they are clicked away: someone may have looked elsewhere.
  const close = () => box.remove();
  box.addEventListener("click", close);
  if (box.dataset.level !== "error") setTimeout(close, 6000);
}

document.querySelectorAll("[data-toast]").forEach(fade);
// A server's answer may carry toasts: HX-Trigger: {"toast": {"text": …, "level": …}}
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level));
document.addEventListener("htmx:sendError", () => toast(gettext("Sluice does not answer. Try again in a moment."), "error"));
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status === 401 || event.detail.xhr.status === 403) window.location.reload();
  else toast(gettext("This did not work. Reload the page and try again."), "error");
});

/** Ask; resolves to true only for a clear yes. */
export function confirmed(text, action) {
  const dialog = document.getElementById("confirm-dialog");
  dialog.querySelector("[data-text]").textContent = text;
  if (action) dialog.querySelector("[data-action]").textContent = action;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const button = event.submitter;
  const text = button?.dataset.confirm ?? form.dataset.confirm;
  if (text && form.dataset.confirmed !== "yes") {
    event.preventDefault();
    event.stopPropagation();
    if (await confirmed(text, button?.dataset.confirmAction ?? form.dataset.confirmAction)) {
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

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
});

// --- shortcuts -----------------------------------------------------------------------------------

const GOTO = { h: "home", j: "jobs", t: "templates" };
let waitingForPlace = false;

function link(name) {
  document.querySelector(`[data-goto="${name}"]`)?.click();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, [contenteditable], .ace_editor, .xterm, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (waitingForPlace) {
    waitingForPlace = false;
    if (GOTO[event.key]) link(GOTO[event.key]);
    return;
  }
  if (event.key === "g") {
    waitingForPlace = true;
    setTimeout(() => { waitingForPlace = false; }, 1500);
  } else if (event.key === "n") link("submit");
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (search) { event.preventDefault(); search.focus(); }
  } else if (event.key === "?") document.getElementById("shortcuts-dialog").showModal();
});
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-show-shortcuts]")) document.getElementById("shortcuts-dialog").showModal();
});
