// The submit form: shows the job document and writes every change back to it. After a change the submit page checks the
// document, saves the draft and updates the editor. Fields, labels and defaults come from the form description
// (jobs/form_description.py) as attributes of the controls.

import { durationInput } from "./format.js";
import { clearErrors, showError } from "./form-errors.js";
import { FrameworkChoice } from "./framework-choice.js";
import { gettext, interpolate, ngettext } from "./i18n.js";
import { formatValue, parseValue, readValue, listRoles, uniqueRoleName, writeValue } from "./job-document.js";

let serial = 0; // makes the ids of copied elements unique

/** Copy the content of a <template> and make its ids unique. */
function instantiate(id) {
  const fragment = document.getElementById(id).content.cloneNode(true);
  serial += 1;
  for (const attribute of ["id", "for", "aria-describedby"]) {
    for (const element of fragment.querySelectorAll(`[${attribute}]`)) element.setAttribute(attribute, `${element.getAttribute(attribute)}-${serial}`);
  }
  return fragment.firstElementChild;
}

export class JobForm {
  /** `holder.document` is the job document; `changed()` is called after every change of it. */
  constructor(root, holder, page, changed) {
    Object.assign(this, { root, holder, page, changed });
    this.framework = new FrameworkChoice(this);
    this.touched = new WeakSet(); // controls that had the focus; problems are shown only at these
    this.problems = [];
    this.showAll = false; // true: problems are shown at all controls
    this.removedRoles = null; // roles removed by switching to a single task, restored by switching back
    this.distributed = false;
    this.codeSource = null; // "upload", "directory" or "" as selected by the person; null: the document decides
    root.addEventListener("input", (event) => this.onInput(event));
    root.addEventListener("change", (event) => this.onChange(event));
    root.addEventListener("click", (event) => this.onClick(event));
    root.addEventListener("focusout", (event) => { if (event.target.value !== undefined) { this.touched.add(event.target); this.showProblems(); } });
    root.addEventListener("submit", (event) => event.preventDefault());
  }

  get document() { return this.holder.document; }
  get namespace() { return this.page.namespaces.find((namespace) => namespace.name === this.document.namespace); }

  // --- document → form --------------------------------------------------------------------

  show() {
    const list = listRoles(this.document);
    if (list.length > 1 || (list[0]?.taskNumber ?? 1) > 1 || (this.document.framework && !this.framework.fitsSingleTask(this.framework.preset))) this.distributed = true;
    this.showNamespace();
    const place = this.root.querySelector("[data-roles]");
    place.replaceChildren(...list.map((role, index) => this.createRoleSection(index)));
    for (const rows of this.root.querySelectorAll("[data-rows]")) if (!rows.closest("[data-role]")) this.showRows(rows);
    for (const map of this.root.querySelectorAll("[data-map]")) if (!map.closest("[data-role]")) this.showMap(map);
    for (const control of this.root.querySelectorAll("[data-path]")) this.fill(control);
    this.showKind();
    this.framework.show();
    this.showCode();
    this.showHiddenHint();
    this.showProblems();
  }

  /** Show a hint if basic mode hides fields that the job uses. */
  showHiddenHint() {
    const isUsed = (control) => (control.type === "checkbox" ? control.checked : control.value !== "" && control.value !== (control.dataset.default ?? ""));
    const rows = this.root.querySelectorAll("[data-pro] [data-index], [data-pro] [data-pair]");
    const hidden = rows.length > 0 || [...this.root.querySelectorAll("[data-pro] [data-path]")].some(isUsed);
    this.root.querySelector("[data-hidden-hint]").hidden = !hidden;
  }

  createRoleSection(index) {
    const section = instantiate("role-row");
    section.dataset.prefix = `taskRoles[${index}]`;
    for (const rows of section.querySelectorAll("[data-rows]")) this.showRows(rows);
    for (const map of section.querySelectorAll("[data-map]")) this.showMap(map);
    this.showSizes(section);
    this.showRoleTitle(section);
    return section;
  }

  pathOf(element, name = element.dataset.path) {
    const prefix = element.parentElement.closest("[data-prefix]")?.dataset.prefix;
    return prefix ? `${prefix}.${name}` : name;
  }

  showRows(place) {
    const path = this.pathOf(place, place.dataset.rows);
    const list = readValue(this.document, path);
    place.replaceChildren(...(Array.isArray(list) ? list : []).map((_, index) => {
      const row = instantiate(`row-${place.dataset.rows}`);
      row.dataset.prefix = `${path}[${index}]`;
      row.dataset.index = index;
      return row;
    }));
    for (const control of place.querySelectorAll("[data-path]")) this.fill(control);
    const section = place.closest("[data-role]");
    if (section) this.showArguments(section);
  }

  showMap(place) {
    const value = readValue(this.document, this.pathOf(place, place.dataset.map));
    const pairs = value && typeof value === "object" ? Object.entries(value).filter(([key]) => key !== "isDebug") : [];
    place.replaceChildren(...pairs.map(([key, text]) => this.createPair(key, text)));
  }

  createPair(key, value) {
    const row = instantiate("pair-row");
    row.querySelector("[data-key]").value = key;
    row.querySelector("[data-value]").value = typeof value === "object" ? JSON.stringify(value) : value;
    return row;
  }

  fill(control) {
    const value = readValue(this.document, this.pathOf(control));
    const { kind } = control.dataset;
    if (kind === "flag") { control.checked = value === true; return; }
    const text = formatValue(kind, value);
    if (control.tagName === "SELECT") this.selectOption(control, text || (control.dataset.default ?? ""));
    else if (control.value !== text) control.value = text;
    this.fitHeight(control);
  }

  /** Set the height of a textarea to its number of lines, between 3 and 20. */
  fitHeight(control) {
    if (control.tagName === "TEXTAREA") control.rows = Math.min(20, Math.max(3, control.value.split("\n").length));
  }

  /** Select a value. A missing option is added, so that showing a document never changes it. */
  selectOption(control, value) {
    control.value = value;
    if (control.value !== value) {
      control.append(new Option(value, value));
      control.value = value;
    }
  }

  /** Replace the help text of a field; an empty text restores the help of the form description. */
  setHint(name, text) {
    const hint = this.root.querySelector(`[data-hint="${name}"]`);
    hint.dataset.help ??= hint.textContent;
    hint.textContent = text || hint.dataset.help;
  }

  showNamespace() {
    const namespace = this.namespace;
    this.setHint("namespace", namespace?.description);
    this.root.querySelector("#images").replaceChildren(...(namespace?.images ?? []).map((image) => new Option(image, image)));
    this.showImageHint();
    const typeControl = this.root.querySelector("#f-gpuType");
    typeControl.replaceChildren(new Option(gettext("Any"), ""), ...(namespace?.gpuTypes ?? []).map((type) => new Option(type, type)));
    this.fill(typeControl);
    this.showTimeHint();
  }

  /** Show which image is used if the field is empty: that of the framework's version, else the namespace's default. */
  showImageHint() {
    const { framework } = this.document;
    const image = this.namespace?.defaultImage;
    if (framework?.version) this.setHint("image", interpolate(gettext("Empty: the cluster's image of %(framework)s %(version)s."), { framework: framework.name, version: framework.version }));
    else this.setHint("image", image && interpolate(gettext("Empty: %(image)s, the namespace's default."), { image }));
  }

  showTimeHint() {
    const time = this.namespace?.defaultTime && durationInput(this.namespace.defaultTime);
    const most = this.namespace?.maxTime && durationInput(this.namespace.maxTime);
    if (time && most) this.setHint("timeLimit", interpolate(gettext("Empty: %(time)s. At most %(most)s."), { time, most }));
    else if (time) this.setHint("timeLimit", interpolate(gettext("Empty: %(time)s."), { time }));
    else this.setHint("timeLimit", most && interpolate(gettext("At most %(time)s."), { time: most }));
  }

  showSizes(section) {
    const namespace = this.namespace;
    const choice = section.querySelector("[data-size]");
    const sizes = namespace?.sizes ?? [];
    choice.replaceChildren(new Option(gettext("Custom"), ""), ...sizes.map((size) => new Option(size.title, size.name)));
    const role = readValue(this.document, section.dataset.prefix) ?? {};
    const gpuType = role.gpuType || this.document.gpuType || "";
    const matching = sizes.find((size) => size.cpuNumber === role.cpuNumber && size.memoryMB === role.memoryMB && size.gpuNumber === (role.gpuNumber ?? 0) && (!size.gpuNumber || size.gpuType === gpuType));
    choice.value = matching?.name ?? "";
    const typeControl = section.querySelector("[data-path=gpuType]");
    typeControl.replaceChildren(new Option(this.document.gpuType || gettext("Any"), ""), ...(namespace?.gpuTypes ?? []).map((type) => new Option(type, type)));
    this.fill(typeControl);
  }

  showRoleTitle(section) {
    const role = readValue(this.document, section.dataset.prefix) ?? {};
    section.querySelector("[data-role-title]").textContent = interpolate(ngettext("%(name)s, %(count)s task", "%(name)s, %(count)s tasks", role.taskNumber || 1), { name: role.title || role.name || "–", count: role.taskNumber || 1 });
    section.querySelector("[data-remove-role]").disabled = listRoles(this.document).length < 2;
    this.showArguments(section);
  }

  showArguments(section) {
    const place = section.querySelector("[data-arguments]");
    const list = readValue(this.document, `${section.dataset.prefix}.parameters`);
    const parts = (Array.isArray(list) ? list : []).filter((row) => row?.key).map((row) => `--${row.key}=${row.value ?? ""}`);
    place.hidden = !parts.length;
    place.textContent = parts.join(" ");
  }

  showKind() {
    for (const button of this.root.querySelectorAll("[data-job-kind]")) {
      const on = (button.dataset.jobKind === "distributed") === this.distributed;
      button.classList.toggle("active", on);
      button.setAttribute("aria-pressed", String(on));
    }
    for (const element of this.root.querySelectorAll("[data-distributed]")) element.hidden = !this.distributed;
    this.showRoleGpuTypes();
  }

  /** A job with one role has one GPU type, in the basics; the role's own is shown only if the job file has it. */
  showRoleGpuTypes() {
    for (const control of this.root.querySelectorAll("[data-role] [data-path=gpuType]")) {
      control.closest("[class^=field-]").hidden = !this.distributed && !readValue(this.document, this.pathOf(control));
    }
  }

  showCode() {
    const uploaded = this.document.code?.selector === "codeFile";
    const source = this.codeSource ?? (uploaded ? "upload" : this.document.codeDir ? "directory" : "");
    this.root.querySelector("[data-code-source]").value = source;
    for (const part of this.root.querySelectorAll("[data-code]")) part.hidden = part.dataset.code !== source;
  }

  // --- form → document --------------------------------------------------------------------

  onInput(event) {
    const control = event.target;
    if (control.matches("[data-key], [data-value]")) { this.readMap(control.closest("[data-map]")); return; }
    if (!control.dataset.path) return;
    writeValue(this.document, this.pathOf(control), this.parseControl(control));
    this.fitHeight(control);
    const section = control.closest("[data-role]");
    if (control.dataset.path === "namespace") { this.showNamespace(); this.framework.showVersions(); }
    if (control.dataset.path === "namespace" || control.id === "f-gpuType") {
      for (const role of this.root.querySelectorAll("[data-role]")) this.showSizes(role);
    }
    if (section) {
      this.showRoleTitle(section);
      if (["cpuNumber", "memoryMB", "gpuNumber", "gpuType"].includes(control.dataset.path)) this.showSizes(section);
    }
    this.showHiddenHint();
    this.changed();
  }

  parseControl(control) {
    const { kind, default: defaultValue } = control.dataset;
    if (kind === "flag") return control.checked || undefined;
    return parseValue(control.tagName === "SELECT" ? "select" : kind, control.value, { required: control.required, defaultValue });
  }

  readMap(place) {
    const path = this.pathOf(place, place.dataset.map);
    const before = readValue(this.document, path);
    const pairs = [...place.children].map((row) => [row.querySelector("[data-key]").value.trim(), row.querySelector("[data-value]").value]).filter(([key]) => key);
    const value = Object.fromEntries(pairs);
    if (before?.isDebug !== undefined && path === "jobEnvs") value.isDebug = before.isDebug;
    writeValue(this.document, path, Object.keys(value).length ? value : undefined);
    this.changed();
  }

  onChange(event) {
    const control = event.target;
    if (control.matches("[data-size]")) this.applySize(control);
    else if (control.matches("[data-preset]")) this.framework.apply(control.value);
    else if (control.matches("[data-version]")) this.framework.applyVersion(control.value);
    else if (control.matches("[data-code-source]")) this.applyCodeSource(control.value);
  }

  applySize(control) {
    const section = control.closest("[data-role]");
    const size = this.namespace?.sizes.find((one) => one.name === control.value);
    if (!size) { section.querySelector("[data-path=cpuNumber]").focus(); return; }
    const role = readValue(this.document, section.dataset.prefix);
    Object.assign(role, { cpuNumber: size.cpuNumber, memoryMB: size.memoryMB, gpuNumber: size.gpuNumber });
    if (size.shmMB !== null) role.shmMB = size.shmMB;
    delete role.gpuType;
    if (this.distributed && size.gpuType) role.gpuType = size.gpuType;
    else if (!this.distributed) this.document.gpuType = size.gpuType;
    for (const field of section.querySelectorAll("[data-path]")) this.fill(field);
    this.fill(this.root.querySelector("#f-gpuType"));
    this.showRoleGpuTypes();
    this.changed();
  }

  keepOpen(section) {
    writeValue(this.document, `${section.dataset.prefix}.command`, "sleep infinity");
    this.fill(section.querySelector("[data-path=command]"));
    this.changed();
  }

  applyCodeSource(source) {
    this.codeSource = source;
    if (source !== "upload") { delete this.document.code; this.holder.upload = null; }
    if (source !== "directory") this.document.codeDir = "";
    this.showCode();
    for (const field of this.root.querySelectorAll("[data-path=codeDir]")) this.fill(field);
    this.changed();
  }

  onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const { dataset } = button;
    if ("jobKind" in dataset) this.setDistributed(dataset.jobKind === "distributed");
    else if ("keepOpen" in dataset) this.keepOpen(button.closest("[data-role]"));
    else if ("addRole" in dataset) this.addRole();
    else if ("copyRole" in dataset) this.copyRole(button.closest("[data-role]"));
    else if ("removeRole" in dataset) this.removeRole(button.closest("[data-role]"));
    else if ("fillRoles" in dataset) this.framework.applyRoles();
    else if ("addRow" in dataset) this.addRow(button);
    else if ("removeRow" in dataset) this.removeRow(button);
    else if ("addPair" in dataset) this.addPair(button);
    else if ("removePair" in dataset) this.removePair(button);
  }

  setDistributed(distributed) {
    if (distributed === this.distributed) return;
    this.distributed = distributed;
    if (distributed && this.removedRoles) {
      this.document.taskRoles = [this.document.taskRoles[0], ...this.removedRoles.roles];
      this.document.taskRoles[0].taskNumber = this.removedRoles.taskNumber;
      if (this.removedRoles.framework) this.document.framework = this.removedRoles.framework;
      this.removedRoles = null;
    } else if (!distributed) {
      const [first, ...others] = listRoles(this.document);
      this.removedRoles = { roles: others, taskNumber: first?.taskNumber ?? 1, framework: this.document.framework };
      if (first) { first.taskNumber = 1; this.document.taskRoles = [first]; }
      if (!this.framework.fitsSingleTask(this.framework.preset)) delete this.document.framework;
    }
    this.show();
    this.changed();
  }

  addRole() {
    const list = listRoles(this.document);
    const role = structuredClone({ ...list.at(-1), name: uniqueRoleName(this.document, "worker"), taskNumber: 1, portList: [] });
    for (const name of ["isMain", "title", "env", "parameters"]) delete role[name];
    this.document.taskRoles = [...list, role];
    this.showAndFocusRole(list.length);
  }

  copyRole(section) {
    const index = this.indexOf(section);
    const role = structuredClone(this.document.taskRoles[index]);
    role.name = uniqueRoleName(this.document, role.name);
    delete role.isMain;
    this.document.taskRoles.splice(index + 1, 0, role);
    this.showAndFocusRole(index + 1);
  }

  removeRole(section) {
    const index = this.indexOf(section);
    this.document.taskRoles.splice(index, 1);
    this.showAndFocusRole(Math.max(0, index - 1));
  }

  indexOf(section) { return [...section.parentElement.children].indexOf(section); }

  showAndFocusRole(index) {
    this.distributed = true;
    this.show();
    const section = this.root.querySelectorAll("[data-role]")[index];
    section?.querySelector("[data-path=name]").focus();
    this.changed();
  }

  addRow(button) {
    const place = this.containerFor(button, "rows", button.dataset.addRow);
    const path = this.pathOf(place, place.dataset.rows);
    const newRow = JSON.parse(document.getElementById(`row-${place.dataset.rows}`).dataset.newRow);
    const list = readValue(this.document, path);
    writeValue(this.document, path, [...(Array.isArray(list) ? list : []), newRow]);
    this.showRows(place);
    place.lastElementChild.querySelector("input, select").focus();
    this.changed();
  }

  containerFor(button, kind, name) {
    return (button.closest("[data-role]") ?? this.root).querySelector(`[data-${kind}="${name}"]`);
  }

  removeRow(button) {
    const row = button.closest("[data-index]");
    const place = row.parentElement;
    const path = this.pathOf(place, place.dataset.rows);
    const list = readValue(this.document, path).toSpliced(Number(row.dataset.index), 1);
    // portList is always part of a job file; other empty lists are left out.
    const keepEmpty = place.dataset.rows === "portList";
    writeValue(this.document, path, list.length || keepEmpty ? list : undefined);
    this.showRows(place);
    place.parentElement.querySelector("[data-add-row]").focus();
    this.changed();
  }

  addPair(button) {
    const place = this.containerFor(button, "map", button.dataset.addPair);
    place.append(this.createPair("", ""));
    place.lastElementChild.querySelector("[data-key]").focus();
  }

  removePair(button) {
    const place = button.closest("[data-map]");
    button.closest("[data-pair]").remove();
    place.parentElement.querySelector("[data-add-pair]").focus();
    this.readMap(place);
  }

  // --- problems at fields -------------------------------------------------------------------------

  /** Find the control of the value at a path, or at the nearest enclosing path that has a control. */
  controlAt(path) {
    const parts = path.split(/(?=[.[])/);
    for (let length = parts.length; length > 0; length -= 1) {
      const wanted = parts.slice(0, length).join("");
      for (const control of this.root.querySelectorAll("[data-path]")) if (this.pathOf(control) === wanted) return control;
      for (const place of this.root.querySelectorAll("[data-map]")) {
        const base = this.pathOf(place, place.dataset.map);
        if (wanted === base || wanted.startsWith(`${base}.`)) {
          const key = wanted.slice(base.length + 1);
          const row = [...place.children].find((one) => one.querySelector("[data-key]").value === key);
          return row?.querySelector("[data-value]") ?? place.parentElement.querySelector("[data-add-pair]");
        }
      }
      for (const place of this.root.querySelectorAll("[data-rows]")) {
        if (this.pathOf(place, place.dataset.rows) === wanted) return place.parentElement.querySelector("[data-add-row]");
      }
      if (wanted.startsWith("secrets.")) return this.root.querySelector(`[data-secret="${CSS.escape(wanted.slice(8))}"]`);
      if (wanted === "code") return this.root.querySelector("[data-upload]");
      const role = [...this.root.querySelectorAll("[data-role]")].find((section) => section.dataset.prefix === wanted);
      if (role) return role.querySelector("[data-path=cpuNumber]");
    }
    if (path === "framework.version") return this.root.querySelector("[data-version]");
    return path.startsWith("framework") ? this.root.querySelector("[data-preset]") : null;
  }

  showProblems() {
    clearErrors(this.root);
    this.problems.forEach((problem, index) => {
      const control = this.controlAt(problem.path ?? "");
      if (control && !control.matches("button") && (this.showAll || this.touched.has(control))) showError(control, problem.message, index);
    });
  }

  /** Return the label of the field at a path, with the role's name if there are several roles. */
  labelFor(path) {
    const control = this.controlAt(path);
    const label = control?.getAttribute("aria-label") ?? control?.labels?.[0]?.textContent.trim();
    const role = control?.closest("[data-role]");
    const name = role && listRoles(this.document).length > 1 ? readValue(this.document, `${role.dataset.prefix}.name`) : "";
    return label && name ? `${name}: ${label}` : label;
  }

  /** Scroll to the field at a path and focus it; returns false if there is none. */
  goTo(path) {
    const control = this.controlAt(path);
    if (!control) return false;
    this.touched.add(control);
    this.showProblems();
    control.focus();
    control.scrollIntoView({ block: "center" });
    return true;
  }
}
