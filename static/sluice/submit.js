// The submit page: one document, shown by the form and by the editor; checked by the server while one types.

import { Draft, copy, randomKey, same } from "./job-document.js";
import { openEditor } from "./job-editor.js";
import { JobForm } from "./job-form.js";
import { toast } from "./shell.js";
import { duration } from "./times.js";

const gettext = window.gettext;
const interpolate = window.interpolate;
const CHECK_AFTER_MS = 350;
const RETRY_MS = 4000;
const PRO_KEY = "sluice.professional";

const root = document.getElementById("submit");
if (root) start();

function start() {
  const page = JSON.parse(document.getElementById("submit-page").textContent);
  const find = (selector) => root.querySelector(selector);
  const csrf = find("[name=csrfmiddlewaretoken]").value;
  const draft = new Draft(page.user);
  const initial = copy(page.document);
  // `upload` is code already on the server; `secrets` never leaves this object except to submit.
  const state = { document: copy(initial), upload: null, clonedFrom: page.clonedFrom, secrets: {}, imageLogins: {}, text: "", format: "yaml", checked: null, view: "form" };
  let editor = null;
  let fromEditor = false; // the text is the truth until the document follows it
  let timer = null;
  let checksRequested = 0;
  let lastAnswered = 0;
  let key = randomKey();

  const form = new JobForm(find("#job-form"), state, page, () => { fromEditor = false; changed(); });

  // --- change → draft, check --------------------------------------------------------------------------

  function changed() {
    checksRequested += 1;
    key = randomKey();
    setStatus("busy", gettext("Looking …"));
    clearTimeout(timer);
    timer = setTimeout(check, CHECK_AFTER_MS);
    saveDraft();
  }

  function saveDraft() {
    const typed = fromEditor ? state.text : null;
    if (same(state.document, initial) && !typed && !state.upload) draft.forget();
    else draft.save({ document: state.document, text: typed, view: state.view, upload: state.upload, clonedFrom: state.clonedFrom });
  }

  /** The upload that the job wants: of this page, or of the job that it is a copy of. */
  function codeDigest() {
    return state.document.code?.selector === "codeFile" ? (state.upload?.sha256 ?? state.document.code.uploadId ?? "") : "";
  }

  async function check(extra = {}) {
    const number = checksRequested;
    const body = { format: state.format, secrets: Object.keys(state.secrets).filter((name) => state.secrets[name] !== ""), code: codeDigest(), ...extra };
    if (!extra.text) Object.assign(body, fromEditor ? { text: state.text, filename: state.text.trimStart().startsWith("{") ? "" : "job.yaml" } : { document: state.document });
    let answer;
    try {
      const response = await fetch(page.check, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRFToken": csrf }, body: JSON.stringify(body) });
      if (sessionEnded(response)) return null;
      answer = await response.json();
      if (!response.ok) { setStatus("bad", answer.detail); return null; }
    } catch {
      setStatus("bad", gettext("Sluice does not answer. What you typed is kept; it is tried again by itself."));
      timer = setTimeout(check, RETRY_MS);
      return null;
    }
    if (extra.import) return answer;
    if (number !== checksRequested) return null; // something was changed meanwhile; a newer check follows
    lastAnswered = number;
    applyCheck(answer);
    return answer;
  }

  function sessionEnded(response) {
    if (response.status !== 401 && response.status !== 403) return false;
    find("[data-session-bar]").hidden = false;
    find("[data-sign-in]").href = `${page.login}?next=${encodeURIComponent("/submit")}`;
    saveDraft();
    setStatus("bad", gettext("Your session has ended."));
    return true;
  }

  function applyCheck(answer) {
    state.checked = answer;
    if (fromEditor) {
      // The form follows the text; the text itself stays as it was typed.
      if (answer.document) state.document = answer.document;
      if (answer.secrets) Object.assign(state.secrets, answer.secrets);
      Object.assign(state.imageLogins, answer.imageLogins ?? {});
      form.show();
      showDialect(answer);
      saveDraft();
    } else {
      state.text = answer.text;
      editor?.setText(answer.text);
    }
    editor?.setProblems(answer.problems, answer.warnings);
    form.problems = answer.problems;
    form.showProblems();
    showSecrets();
    showSidebar(answer);
  }

  // --- the side ---------------------------------------------------------------------------------------

  function setStatus(kind, words) {
    const place = find("[data-status]");
    place.dataset.state = kind;
    place.querySelector("[data-text]").textContent = words;
  }

  function list(place, lines) {
    place.replaceChildren(...lines.map((words) => Object.assign(document.createElement("li"), { textContent: words })));
    place.hidden = !lines.length;
  }

  function startText(preview) {
    if (preview.startsNow) return gettext("now");
    if (preview.expectedStart) return interpolate(gettext("by %(time)s"), { time: new Intl.DateTimeFormat(document.documentElement.lang, { dateStyle: "short", timeStyle: "short" }).format(new Date(preview.expectedStart)) }, true);
    return gettext("when there is room");
  }

  function costText(preview) {
    if (preview.machineHours === null) return "–";
    return interpolate(gettext("%(hours)s machine hours"), { hours: Number(preview.machineHours.toFixed(2)) }, true);
  }

  function showSidebar(answer) {
    const { preview, problems } = answer;
    const places = find("[data-problems]");
    places.hidden = !problems.length;
    places.replaceChildren(...problems.map(problemItem));
    if (problems.length) {
      setStatus("bad", interpolate(window.ngettext("%(count)s thing to mend", "%(count)s things to mend", problems.length), { count: problems.length }, true));
    } else if (preview?.startsNow) setStatus("good", gettext("Can start now."));
    else setStatus("wait", [gettext("Will wait."), ...(preview?.obstacles ?? [])].join(" "));
    find("[data-plan]").hidden = !preview;
    const warnings = answer.warnings ?? [];
    find("[data-warnings-now]").hidden = !warnings.length;
    list(find("[data-warnings-now] [data-list]"), warnings.map((one) => (one.path ? `${one.path}: ${one.message}` : one.message)));
    find("[data-script-box]").hidden = !preview?.script;
    if (!preview) return;
    list(find("[data-words]"), preview.words);
    list(find("[data-notes]"), preview.notes);
    const { totals } = preview;
    find("[data-plan] [data-start]").textContent = startText(preview);
    find("[data-plan] [data-limit]").textContent = preview.timeLimit === null ? "–" : duration(preview.timeLimit);
    find("[data-plan] [data-cost]").textContent = costText(preview);
    find("[data-totals]").textContent = [
      interpolate(window.ngettext("%(count)s task", "%(count)s tasks", totals.tasks), { count: totals.tasks }, true),
      `${totals.cpus} CPU`, `${Number((totals.memory / 1024).toPrecision(3))} GB`, ...(totals.gpus ? [`${totals.gpus} GPU`] : []),
    ].join(" · ");
    find("[data-script]").textContent = preview.script;
  }

  function problemItem(problem) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "submit-problem";
    const place = document.createElement("strong");
    place.textContent = (state.view === "form" && form.labelFor(problem.path ?? "")) || problem.path || gettext("job file");
    button.append(place, " ", problem.message);
    button.addEventListener("click", () => goTo(problem));
    item.append(button);
    return item;
  }

  function goTo(problem) {
    if (state.view !== "form") { editor?.goTo(problem.line ?? 1, problem.column); return; }
    const control = form.controlAt(problem.path ?? "");
    if (control?.closest("[data-pro]")) setProfessional(true);
    if (control?.closest("[data-distributed]") && !form.distributed) { form.distributed = true; form.showKind(); }
    if (control?.closest("[data-code]")?.hidden) { form.codeSource = control.closest("[data-code]").dataset.code; form.showCode(); }
    if (!form.goTo(problem.path ?? "")) show("yaml").then(() => editor.goTo(problem.line ?? 1, problem.column));
  }

  // --- form, YAML, JSON --------------------------------------------------------------------------------

  async function show(view) {
    const leaving = state.view;
    if (leaving !== "form" && view !== leaving && fromEditor) {
      if (checksRequested !== lastAnswered) { clearTimeout(timer); await check(); }
      if (checksRequested !== lastAnswered || !state.checked?.document) {
        toast(gettext("Mend the text first: it cannot be read as a job yet, and would be lost."), "error");
        return;
      }
    }
    state.view = view;
    for (const button of root.querySelectorAll("[data-view]")) {
      const on = button.dataset.view === view;
      button.classList.toggle("active", on);
      button.setAttribute("aria-pressed", String(on));
    }
    find("[data-pane=form]").hidden = view !== "form";
    find("[data-pane=editor]").hidden = view === "form";
    if (state.checked) showSidebar(state.checked); // problems are named by field here, by path there
    if (view === "form") { if (leaving !== "form") form.show(); return; }
    if (state.format !== view) {
      fromEditor = false;
      state.format = view;
      state.text = "";
    }
    if (state.text === "") {
      // An answer that is still on its way has the text in the other format: it is not for us any more.
      clearTimeout(timer);
      checksRequested += 1;
      setStatus("busy", gettext("Looking …"));
    }
    await ensureEditor();
    editor.setFormat(view);
    if (state.text === "") await check();
    editor.setText(state.text);
    editor.setProblems(state.checked?.problems ?? [], state.checked?.warnings ?? []);
    editor.resize();
  }

  let opening = null;
  function ensureEditor() {
    opening ??= openEditor(find("[data-editor]"), {
      ace: page.ace, schema: page.schema, format: state.format, text: state.text,
      onChange(text) { state.text = text; fromEditor = true; changed(); },
    }).then((made) => { editor = made; });
    return opening;
  }

  root.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.view) show(button.dataset.view);
    if (button?.dataset.export) exportAs(button.dataset.export);
  });

  function setProfessional(on) {
    root.dataset.mode = on ? "professional" : "basic";
    find("[data-professional]").checked = on;
    try { localStorage.setItem(PRO_KEY, on ? "1" : ""); } catch { /* only for this page, then */ }
  }
  find("[data-professional]").addEventListener("change", (event) => setProfessional(event.target.checked));

  // --- import, export -----------------------------------------------------------------------------------

  async function importText(text, filename) {
    const answer = await check({ text, filename, import: true });
    if (!answer) return;
    if (!answer.document || (!answer.preview && answer.dialect === undefined)) {
      // Not readable as a job: show it as it is, with its mistakes.
      state.format = /\.json$/i.test(filename) || text.trimStart().startsWith("{") ? "json" : "yaml";
      state.text = text;
      fromEditor = true;
      await show(state.format);
      editor.setText(text);
      changed();
      toast(gettext("The file has mistakes; they are marked in the editor."), "error");
      return;
    }
    state.document = answer.document;
    state.clonedFrom = "";
    Object.assign(state.secrets, answer.secrets ?? {});
    state.imageLogins = answer.imageLogins ?? {};
    fromEditor = false;
    state.text = "";
    form.codeSource = null;
    form.distributed = false;
    form.removedRoles = null;
    form.show();
    showImport(filename, answer);
    changed();
    if (state.view !== "form") { state.text = answer.text; editor?.setText(answer.text); }
  }

  function showImport(filename, answer) {
    const bar = find("[data-import-bar]");
    bar.hidden = false;
    bar.querySelector("[data-title]").textContent = interpolate(gettext("%(file)s was read as %(format)s."), { file: filename || gettext("The text"), format: answer.dialectTitle }, true);
    list(bar.querySelector("[data-warnings]"), (answer.warnings ?? []).map((one) => [one.line ? interpolate(gettext("line %(line)s"), { line: one.line }, true) : "", one.path, one.message].filter(Boolean).join(": ")));
  }

  function showDialect(answer) {
    const foreign = answer.dialect && answer.dialect !== "sluice" && answer.document;
    if (foreign) showImport("", answer);
  }
  find("[data-import-close]").addEventListener("click", () => { find("[data-import-bar]").hidden = true; });

  const file = find("[data-import-file]");
  find("[data-import]").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    if (chosen) await importText(await chosen.text(), chosen.name);
    file.value = "";
  });

  let depth = 0;
  const drop = find("[data-drop]");
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; drop.hidden = false; } });
  document.addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); drop.hidden = depth === 0; });
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", async (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    drop.hidden = true;
    const [dropped] = event.dataTransfer.files;
    if (dropped && /\.(zip|tar|tgz|gz)$/i.test(dropped.name)) uploadCode(dropped);
    else if (dropped) await importText(await dropped.text(), dropped.name);
  });

  async function exportAs(format) {
    let { text } = state;
    if (!fromEditor) {
      const answer = await check({ import: true, format });
      if (!answer) return;
      ({ text } = answer);
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: format === "json" ? "application/json" : "application/yaml" }));
    link.download = `${String(state.document.jobName || "job").replace(/[^\p{L}\p{N}._~-]/gu, "_")}.${format}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // --- code ----------------------------------------------------------------------------------------------

  find("[data-upload]").addEventListener("change", (event) => { if (event.target.files[0]) uploadCode(event.target.files[0]); });

  function uploadCode(chosen) {
    form.codeSource = "upload";
    form.showCode();
    const bar = find("[data-upload-bar]");
    const words = find("[data-upload-status]");
    bar.hidden = false;
    words.textContent = gettext("Uploading …");
    const request = new XMLHttpRequest();
    request.open("POST", `${page.uploads}?filename=${encodeURIComponent(chosen.name)}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-CSRFToken", csrf);
    request.upload.addEventListener("progress", (event) => { if (event.lengthComputable) bar.firstElementChild.style.width = `${(100 * event.loaded) / event.total}%`; });
    request.addEventListener("loadend", () => {
      bar.hidden = true;
      let body = {};
      try { body = JSON.parse(request.responseText); } catch { /* no answer at all */ }
      if (request.status !== 201) {
        words.textContent = body.detail ?? gettext("The upload did not work. Try it again.");
        if (request.status === 401 || request.status === 403) sessionEnded(request);
        return;
      }
      state.upload = { sha256: body.sha256, name: chosen.name, files: body.files };
      state.document.code = { selector: "codeFile", uploadId: body.sha256 };
      state.document.codeDir = "";
      fromEditor = false;
      showUpload();
      changed();
    });
    request.send(chosen);
  }

  function showUpload() {
    const words = find("[data-upload-status]");
    words.textContent = state.upload ? interpolate(gettext("%(name)s is uploaded (%(files)s files). MODEL_DIR and the working directory are where it is unpacked."), { name: state.upload.name, files: state.upload.files }, true) : "";
  }

  // --- secrets -------------------------------------------------------------------------------------------

  function showSecrets() {
    const names = Array.isArray(state.document.secrets) ? state.document.secrets : [];
    const place = find("[data-secrets]");
    place.hidden = !names.length;
    const rows = place.querySelector("[data-secret-rows]");
    if (same([...rows.querySelectorAll("[data-secret]")].map((one) => one.dataset.secret), names)) return;
    rows.replaceChildren(...names.map((name, index) => {
      const box = document.createElement("div");
      box.className = "col-sm-6";
      const label = Object.assign(document.createElement("label"), { className: "form-label", htmlFor: `secret-${index}`, textContent: name });
      const input = Object.assign(document.createElement("input"), { className: "form-control", id: `secret-${index}`, type: "password", autocomplete: "off", value: state.secrets[name] ?? "" });
      input.dataset.secret = name;
      input.addEventListener("input", () => { state.secrets[name] = input.value; changed(); });
      box.append(label, input);
      return box;
    }));
  }

  // --- submit --------------------------------------------------------------------------------------------

  const dialog = find("[data-confirm-submit]");
  const yes = dialog.querySelector("[data-yes]");

  async function latestCheck() {
    if (lastAnswered !== checksRequested) { clearTimeout(timer); await check(); }
    return state.checked;
  }

  find("[data-submit]").addEventListener("click", async () => {
    form.showAll = true;
    const answer = await latestCheck();
    form.showProblems();
    if (!answer) return;
    if (answer.problems.length) { goTo(answer.problems[0]); return; }
    const fill = (name, words) => { dialog.querySelector(`[data-${name}]`).textContent = words; };
    fill("name", state.document.jobName);
    fill("namespace", state.document.namespace);
    fill("start", startText(answer.preview));
    fill("cost", costText(answer.preview));
    list(dialog.querySelector("[data-words]"), answer.preview.words);
    dialog.querySelector("[data-refused]").hidden = true;
    dialog.showModal();
    yes.focus();
  });

  yes.addEventListener("click", async () => {
    if (yes.disabled) return;
    yes.disabled = true; // and should it be sent twice all the same, the key makes one job of it
    try {
      const names = Array.isArray(state.document.secrets) ? state.document.secrets : [];
      const body = { job: state.document };
      if (names.length) body.secrets = Object.fromEntries(names.map((name) => [name, state.secrets[name] ?? ""]));
      if (codeDigest()) body.code = codeDigest();
      if (Object.keys(state.imageLogins).length) body.image_logins = state.imageLogins;
      if (state.clonedFrom) body.cloned_from = state.clonedFrom;
      const response = await fetch(page.jobs, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRFToken": csrf, "Idempotency-Key": key }, body: JSON.stringify(body) });
      const answer = await response.json();
      if (response.ok) {
        draft.forget();
        window.location.assign(`${page.jobPage}/${answer.id}`);
        return;
      }
      handleRefusal(response, answer);
    } catch {
      showRefusal(dialog, gettext("Sluice does not answer. Try again: it will not become two jobs."));
    }
    yes.disabled = false;
  });

  function showRefusal(box, words) {
    const place = box.querySelector("[data-refused]");
    place.textContent = words;
    place.hidden = false;
  }

  function handleRefusal(response, answer) {
    if (response.status === 401) { dialog.close(); sessionEnded(response); return; }
    const problems = answer.errors?.length ? answer.errors : answer.code === "name_taken" ? [{ path: "jobName", message: answer.detail }] : [];
    if (!problems.length) { showRefusal(dialog, answer.detail); return; }
    dialog.close();
    form.problems = problems;
    showSidebar({ problems, preview: state.checked?.preview, warnings: [] });
    goTo(problems[0]);
  }

  // --- save as template -----------------------------------------------------------------------------------

  const templates = find("[data-template-dialog]");
  find("[data-save-template]").addEventListener("click", async () => {
    await latestCheck();
    const fields = templates.querySelector("form").elements;
    fields.name.value ||= state.document.jobName ?? "";
    fields.namespace.value = state.document.namespace;
    templates.querySelector("[data-refused]").hidden = true;
    templates.showModal();
    fields.name.focus();
  });
  templates.querySelector("[data-yes]").addEventListener("click", async (event) => {
    const fields = templates.querySelector("form").elements;
    if (!templates.querySelector("form").reportValidity()) return;
    event.target.disabled = true;
    const spec = copy(state.document);
    delete spec.code;
    const body = { name: fields.name.value, description: fields.description.value, visibility: fields.visibility.value, spec };
    if (body.visibility === "namespace") body.namespace = fields.namespace.value;
    try {
      const response = await fetch(page.templates, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRFToken": csrf }, body: JSON.stringify(body) });
      const answer = await response.json();
      if (response.ok) { window.location.assign(`${page.templatePage}/${answer.id}`); return; }
      showRefusal(templates, answer.detail);
    } catch {
      showRefusal(templates, gettext("Sluice does not answer. Try again in a moment."));
    }
    event.target.disabled = false;
  });

  // --- begin ----------------------------------------------------------------------------------------------

  function restore(kept) {
    state.document = kept.document;
    state.upload = kept.upload ?? null;
    state.clonedFrom = kept.clonedFrom ?? "";
    form.codeSource = null;
    form.distributed = false;
    form.show();
    showUpload();
    if (kept.text) {
      state.text = kept.text;
      state.format = kept.view === "json" ? "json" : "yaml";
      fromEditor = true;
      show(state.format);
    }
    changed();
  }

  function offerDraft(kept) {
    const bar = find("[data-draft-bar]");
    const button = bar.querySelector("[data-draft-other]");
    const time = new Intl.DateTimeFormat(document.documentElement.lang, { dateStyle: "short", timeStyle: "short" }).format(new Date(kept.at));
    bar.hidden = false;
    if (page.origin) {
      bar.querySelector("[data-text]").textContent = interpolate(gettext("There is a draft of yours from %(time)s."), { time }, true);
      button.textContent = gettext("Go on with the draft instead");
      button.addEventListener("click", () => { bar.hidden = true; restore(kept); });
    } else {
      restore(kept);
      bar.querySelector("[data-text]").textContent = interpolate(gettext("Your draft from %(time)s is back."), { time }, true);
      button.textContent = gettext("Discard it");
      button.addEventListener("click", () => { draft.forget(); window.location.assign("/submit"); });
    }
  }

  // Back by the browser's button: the page as it was left would still be "sending".
  window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });
  setProfessional((() => { try { return Boolean(localStorage.getItem(PRO_KEY)); } catch { return false; } })());
  form.show();
  if (page.origin) {
    const bar = find("[data-origin-bar]");
    bar.hidden = false;
    bar.querySelector("[data-text]").textContent = interpolate(gettext("Filled in from: %(origin)s"), { origin: page.origin }, true);
    // A reload must not send a template's form again.
    if (!window.location.search) window.history.replaceState(null, "", "/submit");
  }
  const kept = draft.load();
  if (kept && !same(kept.document, initial)) offerDraft(kept);
  else if (page.origin && !window.location.search) { changed(); draft.save({ document: state.document }); }
  if (!checksRequested) { checksRequested = 1; check(); }
}
