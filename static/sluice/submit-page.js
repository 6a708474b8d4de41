// The submit page: one job document, shown by the form and by the editor, checked by the server while typing.

import { toast } from "./dialogs.js";
import { dateTime } from "./format.js";
import { gettext, interpolate } from "./i18n.js";
import { Draft, randomKey, isEqual } from "./job-document.js";
import { openEditor } from "./job-editor.js";
import { JobForm } from "./job-form.js";
import { SubmitDialog, TemplateDialog } from "./submit-dialogs.js";
import { acceptFiles, saveFile, showImport, showUpload, uploadArchive } from "./submit-files.js";
import { Sidebar } from "./submit-sidebar.js";

const CHECK_DELAY_MS = 350;
const CHECK_RETRY_MS = 4000;
const PROFESSIONAL_STORAGE_KEY = "sluice.professional";

class SubmitPage {
  constructor(root, config) {
    this.root = root;
    this.config = config;
    this.csrf = this.find("[name=csrfmiddlewaretoken]").value;
    this.draft = new Draft(config.user);
    this.initial = structuredClone(config.document);
    // `upload` describes code that is on the server already. `secrets` are sent only when the job is submitted.
    this.state = { document: structuredClone(config.document), upload: null, clonedFrom: config.clonedFrom, secrets: {}, imageLogins: {}, text: "", format: "yaml", checked: null, view: "form" };
    this.editor = null;
    this.opening = null; // the promise of the editor, once its loading has started
    this.textIsNewer = false; // true if the editor's text has changes that the document lacks
    this.timer = null;
    this.checksRequested = 0;
    this.lastAnswered = 0;
    this.idempotencyKey = randomKey();
    this.form = new JobForm(this.find("#job-form"), this.state, config, () => { this.textIsNewer = false; this.changed(); });
    this.sidebar = new Sidebar(root, {
      labelFor: (problem) => this.state.view === "form" && this.form.labelFor(problem.path ?? ""),
      onProblem: (problem) => this.goTo(problem),
    });
    this.submitDialog = new SubmitDialog(this.find("[data-confirm-submit]"), this);
    this.templateDialog = new TemplateDialog(this.find("[data-template-dialog]"), this);
    this.listen();
  }

  find(selector) { return this.root.querySelector(selector); }

  listen() {
    this.root.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button?.dataset.view) this.show(button.dataset.view);
      if (button?.dataset.export) this.exportAs(button.dataset.export);
    });
    this.find("[data-professional]").addEventListener("change", (event) => this.setProfessional(event.target.checked));
    this.find("[data-upload]").addEventListener("change", (event) => { if (event.target.files[0]) this.upload(event.target.files[0]); });
    this.find("[data-submit]").addEventListener("click", () => this.submit());
    this.find("[data-save-template]").addEventListener("click", async () => { await this.latestCheck(); this.templateDialog.open(); });
    acceptFiles(this.root, { onText: (text, filename) => this.importText(text, filename), onArchive: (file) => this.upload(file) });
    // Reload a page that the browser's back button restores: its submit button would still be disabled.
    window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });
  }

  start() {
    let professional = false;
    try { professional = Boolean(localStorage.getItem(PROFESSIONAL_STORAGE_KEY)); } catch { /* storage is disabled */ }
    this.setProfessional(professional);
    this.form.show();
    const { origin } = this.config;
    const fromTemplateForm = origin && !window.location.search;
    if (origin) {
      this.showBar("[data-origin-bar]", interpolate(gettext("Filled in from: %(origin)s"), { origin }));
      // Replace the URL, so that a reload does not send the template's form again.
      if (fromTemplateForm) window.history.replaceState(null, "", "/submit");
    }
    const stored = this.draft.load();
    if (stored && !isEqual(stored.document, this.initial)) this.offerDraft(stored);
    else if (fromTemplateForm) { this.changed(); this.draft.save({ document: this.state.document }); }
    if (!this.checksRequested) { this.checksRequested = 1; this.check(); }
  }

  showBar(selector, text) {
    const bar = this.find(selector);
    bar.hidden = false;
    bar.querySelector("[data-text]").textContent = text;
    return bar;
  }

  // --- changes, draft, check --------------------------------------------------------------------------

  changed() {
    this.checksRequested += 1;
    this.idempotencyKey = randomKey();
    this.sidebar.setStatus("busy", gettext("Checking …"));
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), CHECK_DELAY_MS);
    this.saveDraft();
  }

  get isChecked() { return this.checksRequested === this.lastAnswered; }

  saveDraft() {
    const { document: job, text, view, upload, clonedFrom } = this.state;
    const typed = this.textIsNewer ? text : null;
    if (isEqual(job, this.initial) && !typed && !upload) this.draft.remove();
    else this.draft.save({ document: job, text: typed, view, upload, clonedFrom });
  }

  /** The SHA-256 of the job's uploaded code, from this page or from the job that is cloned. */
  get codeDigest() {
    const { code } = this.state.document;
    return code?.selector === "codeFile" ? (this.state.upload?.sha256 ?? code.uploadId ?? "") : "";
  }

  checkRequest(extra) {
    const { document: job, format, secrets, text } = this.state;
    const names = Object.keys(secrets).filter((name) => secrets[name] !== "");
    const source = this.textIsNewer ? { text, filename: text.trimStart().startsWith("{") ? "" : "job.yaml" } : { document: job };
    return { format, secrets: names, code: this.codeDigest, ...(extra.text ? {} : source), ...extra };
  }

  /** Request problems and plan from the server. With `extra.import` the response is returned, but not shown. */
  async check(extra = {}) {
    const number = this.checksRequested;
    let answer;
    try {
      const response = await fetch(this.config.check, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRFToken": this.csrf }, body: JSON.stringify(this.checkRequest(extra)) });
      if (this.handleSessionEnd(response)) return null;
      answer = await response.json();
      if (!response.ok) {
        this.sidebar.setStatus("bad", answer.detail);
        if (response.status === 429 && !extra.import) this.timer = setTimeout(() => this.check(), CHECK_RETRY_MS);
        return null;
      }
    } catch {
      this.sidebar.setStatus("bad", gettext("No response from Sluice. Your input is kept; the check is repeated automatically."));
      this.timer = setTimeout(() => this.check(), CHECK_RETRY_MS);
      return null;
    }
    if (extra.import) return answer;
    if (number !== this.checksRequested) return null; // the document changed meanwhile, so a newer check follows
    this.lastAnswered = number;
    this.applyCheck(answer);
    return answer;
  }

  handleSessionEnd(response) {
    if (response.status !== 401 && response.status !== 403) return false;
    this.find("[data-session-bar]").hidden = false;
    this.find("[data-sign-in]").href = `${this.config.login}?next=${encodeURIComponent("/submit")}`;
    this.saveDraft();
    this.sidebar.setStatus("bad", gettext("Your session has ended."));
    return true;
  }

  applyCheck(answer) {
    const { state, form } = this;
    state.checked = answer;
    if (this.textIsNewer) {
      // Update the form from the text; the text stays as the person typed it.
      if (answer.document) state.document = answer.document;
      if (answer.secrets) Object.assign(state.secrets, answer.secrets);
      Object.assign(state.imageLogins, answer.imageLogins ?? {});
      form.show();
      if (answer.dialect && answer.dialect !== "sluice" && answer.document) showImport(this.root, "", answer);
      this.saveDraft();
    } else {
      state.text = answer.text;
      this.editor?.setText(answer.text);
    }
    this.editor?.setProblems(answer.problems, answer.warnings);
    form.problems = answer.problems;
    form.showProblems();
    this.showSecrets();
    this.sidebar.show(answer);
  }

  async latestCheck() {
    if (!this.isChecked) { clearTimeout(this.timer); await this.check(); }
    return this.state.checked;
  }

  // --- views: form, YAML, JSON ---------------------------------------------------------------------------

  async show(view) {
    const { state } = this;
    const previous = state.view;
    if (previous !== "form" && view !== previous && this.textIsNewer && !(await this.textIsReadable())) return;
    state.view = view;
    for (const button of this.root.querySelectorAll("[data-view]")) {
      const on = button.dataset.view === view;
      button.classList.toggle("active", on);
      button.setAttribute("aria-pressed", String(on));
    }
    this.find("[data-pane=form]").hidden = view !== "form";
    this.find("[data-pane=editor]").hidden = view === "form";
    // The sidebar names problems by field label for the form, by path for the editor.
    if (state.checked) this.sidebar.show(state.checked);
    if (view !== "form") await this.showEditor(view);
    else if (previous !== "form") this.form.show();
  }

  async textIsReadable() {
    await this.latestCheck();
    if (this.isChecked && this.state.checked?.document) return true;
    toast(gettext("Fix the text first: it is not a valid job file, and switching would discard it."), "error");
    return false;
  }

  async showEditor(format) {
    const { state } = this;
    if (state.format !== format) {
      this.textIsNewer = false;
      state.format = format;
      state.text = "";
    }
    if (state.text === "") {
      // Ignore the response of a running check: it contains the text in the other format.
      clearTimeout(this.timer);
      this.checksRequested += 1;
      this.sidebar.setStatus("busy", gettext("Checking …"));
    }
    await this.openEditor();
    this.editor.setFormat(format);
    if (state.text === "") await this.check();
    this.editor.setText(state.text);
    this.editor.setProblems(state.checked?.problems ?? [], state.checked?.warnings ?? []);
    this.editor.resize();
  }

  openEditor() {
    const { config, state } = this;
    this.opening ??= openEditor(this.find("[data-editor]"), {
      ace: config.ace, schema: config.schema, format: state.format, text: state.text,
      onChange: (text) => { state.text = text; this.textIsNewer = true; this.changed(); },
    }).then((editor) => { this.editor = editor; });
    return this.opening;
  }

  goTo(problem) {
    const { form } = this;
    if (this.state.view !== "form") { this.editor?.goTo(problem.line ?? 1, problem.column); return; }
    const control = form.controlAt(problem.path ?? "");
    if (control?.closest("[data-pro]")) this.setProfessional(true);
    if (control?.closest("[data-distributed]") && !form.distributed) { form.distributed = true; form.showKind(); }
    if (control?.closest("[data-code]")?.hidden) { form.codeSource = control.closest("[data-code]").dataset.code; form.showCode(); }
    if (!form.goTo(problem.path ?? "")) this.show("yaml").then(() => this.editor.goTo(problem.line ?? 1, problem.column));
  }

  /** Show the problems with which the server rejected the submission. */
  showProblems(problems) {
    this.form.problems = problems;
    this.sidebar.show({ problems, preview: this.state.checked?.preview });
    this.goTo(problems[0]);
  }

  setProfessional(on) {
    this.root.dataset.mode = on ? "professional" : "basic";
    this.find("[data-professional]").checked = on;
    try { localStorage.setItem(PROFESSIONAL_STORAGE_KEY, on ? "1" : ""); } catch { /* storage is disabled */ }
  }

  async submit() {
    this.form.showAll = true;
    const answer = await this.latestCheck();
    this.form.showProblems();
    if (!answer) return;
    if (answer.problems.length) this.goTo(answer.problems[0]);
    else this.submitDialog.open(answer.preview);
  }

  // --- files -------------------------------------------------------------------------------------------

  async importText(text, filename) {
    const answer = await this.check({ text, filename, import: true });
    if (!answer) return;
    const { state, form } = this;
    if (!answer.document || (!answer.preview && answer.dialect === undefined)) { await this.showInvalidFile(text, filename); return; }
    Object.assign(state, { document: answer.document, clonedFrom: "", imageLogins: answer.imageLogins ?? {}, text: "" });
    Object.assign(state.secrets, answer.secrets ?? {});
    this.textIsNewer = false;
    Object.assign(form, { codeSource: null, distributed: false, removedRoles: null });
    form.show();
    showImport(this.root, filename, answer);
    this.changed();
    if (state.view !== "form") { state.text = answer.text; this.editor?.setText(answer.text); }
  }

  /** Show the text of a file that is not a valid job file in the editor, with its problems. */
  async showInvalidFile(text, filename) {
    const { state } = this;
    state.format = /\.json$/i.test(filename) || text.trimStart().startsWith("{") ? "json" : "yaml";
    state.text = text;
    this.textIsNewer = true;
    await this.show(state.format);
    this.editor.setText(text);
    this.changed();
    toast(gettext("The file has problems; they are marked in the editor."), "error");
  }

  async exportAs(format) {
    let { text } = this.state;
    if (!this.textIsNewer) {
      const answer = await this.check({ import: true, format });
      if (!answer) return;
      ({ text } = answer);
    }
    saveFile(text, this.state.document.jobName, format);
  }

  async upload(file) {
    this.form.codeSource = "upload";
    this.form.showCode();
    const { status, body } = await uploadArchive(this.root, this.config.uploads, this.csrf, file);
    if (status !== 201) { this.handleSessionEnd({ status }); return; }
    const { state } = this;
    state.upload = { sha256: body.sha256, name: file.name, files: body.files };
    state.document.code = { selector: "codeFile", uploadId: body.sha256 };
    state.document.codeDir = "";
    this.textIsNewer = false;
    showUpload(this.root, state.upload);
    this.changed();
  }

  // --- secrets -------------------------------------------------------------------------------------------

  showSecrets() {
    const { document: job } = this.state;
    const names = Array.isArray(job.secrets) ? job.secrets : [];
    const place = this.find("[data-secrets]");
    place.hidden = !names.length;
    const rows = place.querySelector("[data-secret-rows]");
    const shown = [...rows.querySelectorAll("[data-secret]")].map((input) => input.dataset.secret);
    if (!isEqual(shown, names)) rows.replaceChildren(...names.map((name, index) => this.secretField(name, `secret-${index}`)));
  }

  secretField(name, id) {
    const { secrets } = this.state;
    const box = Object.assign(document.createElement("div"), { className: "col-sm-6" });
    const label = Object.assign(document.createElement("label"), { className: "form-label", htmlFor: id, textContent: name });
    const input = Object.assign(document.createElement("input"), { className: "form-control", id, type: "password", autocomplete: "off", value: secrets[name] ?? "" });
    input.dataset.secret = name;
    input.addEventListener("input", () => { secrets[name] = input.value; this.changed(); });
    box.append(label, input);
    return box;
  }

  // --- drafts --------------------------------------------------------------------------------------------

  restore(stored) {
    const { state, form } = this;
    Object.assign(state, { document: stored.document, upload: stored.upload ?? null, clonedFrom: stored.clonedFrom ?? "" });
    Object.assign(form, { codeSource: null, distributed: false });
    form.show();
    showUpload(this.root, state.upload);
    if (stored.text) {
      state.text = stored.text;
      state.format = stored.view === "json" ? "json" : "yaml";
      this.textIsNewer = true;
      this.show(state.format);
    }
    this.changed();
  }

  /** Offer the draft on a page that was filled in from a job or template; on an empty page, restore it. */
  offerDraft(stored) {
    const time = dateTime(stored.at);
    const filledIn = Boolean(this.config.origin);
    const text = filledIn ? gettext("You have a draft from %(time)s.") : gettext("Draft from %(time)s restored.");
    const bar = this.showBar("[data-draft-bar]", interpolate(text, { time }));
    const button = bar.querySelector("[data-draft-other]");
    if (filledIn) {
      button.textContent = gettext("Use the draft instead");
      button.addEventListener("click", () => { bar.hidden = true; this.restore(stored); });
    } else {
      this.restore(stored);
      button.textContent = gettext("Discard draft");
      button.addEventListener("click", () => { this.draft.remove(); window.location.assign("/submit"); });
    }
  }
}

const root = document.getElementById("submit");
if (root) new SubmitPage(root, JSON.parse(document.getElementById("submit-page").textContent)).start();
