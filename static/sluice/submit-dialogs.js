// Dialogs of the submit page: confirm and submit the job, save it as a template.

import { showDialogError } from "./dialogs.js";
import { gettext } from "./i18n.js";
import { formatCost, fillList, formatStart } from "./submit-sidebar.js";

async function postJson(url, csrf, body, headers = {}) {
  const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRFToken": csrf, ...headers }, body: JSON.stringify(body) });
  return { response, answer: await response.json() };
}

/** Build the request body of POST /api/v1/jobs. */
export function buildSubmission(state, codeDigest) {
  const names = Array.isArray(state.document.secrets) ? state.document.secrets : [];
  return {
    job: state.document,
    ...(names.length ? { secrets: Object.fromEntries(names.map((name) => [name, state.secrets[name] ?? ""])) } : {}),
    ...(codeDigest ? { code: codeDigest } : {}),
    ...(Object.keys(state.imageLogins).length ? { image_logins: state.imageLogins } : {}),
    ...(state.clonedFrom ? { cloned_from: state.clonedFrom } : {}),
  };
}

export class SubmitDialog {
  /** `page` is the SubmitPage. */
  constructor(dialog, page) {
    Object.assign(this, { dialog, page, button: dialog.querySelector("[data-yes]") });
    this.button.addEventListener("click", () => this.submit());
  }

  open(preview) {
    const { document: job } = this.page.state;
    const values = { name: job.jobName, namespace: job.namespace, start: formatStart(preview), cost: formatCost(preview) };
    for (const [name, text] of Object.entries(values)) this.dialog.querySelector(`[data-${name}]`).textContent = text;
    fillList(this.dialog.querySelector("[data-lines]"), preview.lines);
    showDialogError(this.dialog, "");
    this.dialog.showModal();
    this.button.focus();
  }

  async submit() {
    if (this.button.disabled) return;
    // A request that is repeated after a network error returns the same job, because of its Idempotency-Key.
    this.button.disabled = true;
    const { config, csrf, state } = this.page;
    try {
      const { response, answer } = await postJson(config.jobs, csrf, buildSubmission(state, this.page.codeDigest), { "Idempotency-Key": this.page.idempotencyKey });
      if (response.ok) {
        this.page.draft.remove();
        window.location.assign(`${config.jobPage}/${answer.id}`);
        return;
      }
      this.handleRejection(response, answer);
    } catch {
      showDialogError(this.dialog, gettext("No response from Sluice. Try again: a repeated request creates only one job."));
    }
    this.button.disabled = false;
  }

  handleRejection(response, answer) {
    if (response.status === 401) { this.dialog.close(); this.page.handleSessionEnd(response); return; }
    const nameTaken = answer.code === "name_taken" ? [{ path: "jobName", message: answer.detail }] : [];
    const problems = answer.errors?.length ? answer.errors : nameTaken;
    if (!problems.length) { showDialogError(this.dialog, answer.detail); return; }
    this.dialog.close();
    this.page.showProblems(problems);
  }
}

export class TemplateDialog {
  constructor(dialog, page) {
    Object.assign(this, { dialog, page, form: dialog.querySelector("form") });
    dialog.querySelector("[data-yes]").addEventListener("click", (event) => this.save(event.target));
  }

  open() {
    const { elements } = this.form;
    elements.name.value ||= this.page.state.document.jobName ?? "";
    elements.namespace.value = this.page.state.document.namespace;
    showDialogError(this.dialog, "");
    this.dialog.showModal();
    elements.name.focus();
  }

  async save(button) {
    if (!this.form.reportValidity()) return;
    button.disabled = true;
    const { config, csrf, state } = this.page;
    const { name, description, visibility, namespace } = this.form.elements;
    const spec = structuredClone(state.document);
    delete spec.code; // templates do not keep uploaded code
    const body = { name: name.value, description: description.value, visibility: visibility.value, spec };
    if (visibility.value === "namespace") body.namespace = namespace.value;
    try {
      const { response, answer } = await postJson(config.templates, csrf, body);
      if (response.ok) { window.location.assign(`${config.templatePage}/${answer.id}`); return; }
      showDialogError(this.dialog, answer.detail);
    } catch {
      showDialogError(this.dialog, gettext("No response from Sluice. Try again later."));
    }
    button.disabled = false;
  }
}
