// For all pages: selection of table rows by checkboxes, with a bar of actions for the selected rows.

/** Return the state of the "select all" checkbox if `selected` of `total` rows are selected. */
export function selectAllState(selected, total) {
  return { checked: selected > 0 && selected === total, indeterminate: selected > 0 && selected < total };
}

export class RowSelection {
  /** `countText(count)` returns the bar's text. Call `update()` after the rows of the list were replaced. */
  constructor(list, bar, countText) {
    Object.assign(this, { list, bar, countText });
    list.addEventListener("change", (event) => {
      if (event.target.matches("[data-select-all]")) this.setAll(event.target.checked);
      else this.update();
    });
    bar.addEventListener("click", (event) => { if (event.target.closest("[data-select-none]")) this.setAll(false); });
    this.update();
  }

  get boxes() { return [...this.list.querySelectorAll("tbody input[name=id]")]; }
  get selected() { return this.boxes.filter((box) => box.checked); }
  get ids() { return this.selected.map((box) => box.value); }

  setAll(checked) {
    for (const box of this.boxes) box.checked = checked;
    this.update();
  }

  /** Select the rows with these ids, after the rows were replaced. */
  restore(ids) {
    for (const box of this.boxes) box.checked = ids.includes(box.value);
    this.update();
  }

  update() {
    const count = this.selected.length;
    const all = this.list.querySelector("[data-select-all]");
    if (all) Object.assign(all, selectAllState(count, this.boxes.length));
    this.bar.hidden = count === 0;
    this.bar.querySelector("[data-count]").textContent = this.countText(count);
  }
}
