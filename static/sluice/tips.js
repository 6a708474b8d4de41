// Explanations of form fields: a button beside the label ([data-tip]) shows the text that its aria-describedby names, on
// hover, on keyboard focus and on touch. Escape and leaving it hide it.

let shown = null; // { button, text }

function hide() {
  if (!shown) return;
  shown.text.hidden = true;
  shown = null;
}

function show(button) {
  if (shown?.button === button) return;
  hide();
  const text = document.getElementById(button.getAttribute("aria-describedby"));
  text.hidden = false;
  text.style.left = "0";
  // Move the text left if it would leave the window.
  const overflow = text.getBoundingClientRect().right - document.documentElement.clientWidth + 8;
  if (overflow > 0) text.style.left = `${-overflow}px`;
  shown = { button, text };
}

const findTip = (target) => (target instanceof Element ? target.closest("[data-tip]") : null);

document.addEventListener("pointerover", (event) => {
  const button = event.pointerType === "mouse" && findTip(event.target);
  if (button) show(button);
  // The text stays while the pointer is on it or the button has the focus.
  else if (shown && event.pointerType === "mouse" && !shown.text.contains(event.target) && document.activeElement !== shown.button) hide();
});
document.addEventListener("focusin", (event) => {
  const button = findTip(event.target);
  if (button) show(button);
  else hide();
});
// Some browsers on touch screens do not focus a button that is touched.
document.addEventListener("click", (event) => {
  const button = findTip(event.target);
  if (button) { event.preventDefault(); show(button); button.focus(); }
  else if (shown && !shown.text.contains(event.target)) hide();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
