// The list of templates: choosing several to delete.

const list = document.getElementById("template-list");
const batch = document.getElementById("template-batch");

function showSelection() {
  const count = list.querySelectorAll("tbody input[name=id]:checked").length;
  batch.hidden = count === 0;
  batch.querySelector("[data-count]").textContent = window.interpolate(window.ngettext("%(count)s chosen", "%(count)s chosen", count), { count }, true);
}

if (list) {
  list.addEventListener("change", (event) => {
    if (event.target.matches("[data-select-all]")) list.querySelectorAll("tbody input[name=id]").forEach((box) => { box.checked = event.target.checked; });
    showSelection();
  });
  showSelection();
}
