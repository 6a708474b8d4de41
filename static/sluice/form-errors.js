// For all pages: error messages at form controls, announced to screen readers by aria-describedby.

const MESSAGE_ID_PREFIX = "problem-";

export function clearErrors(root) {
  for (const message of root.querySelectorAll("[data-problem-text]")) message.remove();
  for (const control of root.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.classList.remove("is-invalid");
    const others = (control.getAttribute("aria-describedby") ?? "").split(" ").filter((id) => id && !id.startsWith(MESSAGE_ID_PREFIX));
    if (others.length) control.setAttribute("aria-describedby", others.join(" "));
    else control.removeAttribute("aria-describedby");
  }
}

/** Show a message after the control; `number` makes its id unique on the page. */
export function showError(control, text, number) {
  const message = document.createElement("div");
  message.className = "invalid-feedback d-block";
  message.id = `${MESSAGE_ID_PREFIX}${number}`;
  message.dataset.problemText = "";
  message.textContent = text;
  control.classList.add("is-invalid");
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", [control.getAttribute("aria-describedby"), message.id].filter(Boolean).join(" "));
  (control.closest(".submit-row, .form-check") ?? control).after(message);
}
