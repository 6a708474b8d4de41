// The training framework in the submit form: the choice of framework and strategy, its version, and the roles it needs.

import { gettext, interpolate } from "./i18n.js";
import { listRoles } from "./job-document.js";

export class FrameworkChoice {
  /** `form` is the JobForm whose document and controls it uses. */
  constructor(form) { this.form = form; }

  /** Whether a single task can use this preset: it needs no role but its workers. */
  fitsSingleTask(preset) { return preset?.roles.length === 1; }

  get preset() {
    const { framework } = this.form.document;
    if (!framework) return null;
    const name = (framework.name ?? framework).toString().toLowerCase();
    return this.form.page.presets.find((preset) => preset.framework === name && (!framework.strategy || preset.strategy === framework.strategy)) ?? null;
  }

  show() {
    const preset = this.preset;
    for (const option of this.form.root.querySelectorAll("[data-preset] option")) {
      const offered = this.form.page.presets.find((one) => `${one.framework}/${one.strategy}` === option.value);
      option.hidden = option.disabled = Boolean(offered) && !this.form.distributed && !this.fitsSingleTask(offered);
    }
    this.form.root.querySelector("[data-preset]").value = preset ? `${preset.framework}/${preset.strategy}` : "";
    this.showVersions();
    this.form.root.querySelector("[data-fill-roles]").disabled = !preset;
    this.form.root.querySelector("[data-preset-hint]").textContent = preset
      ? interpolate(gettext("Sets %(variables)s in every task. Roles: %(roles)s."), { variables: preset.variables.join(", "), roles: preset.roles.map((role) => role.name).join(", ") })
      : "";
  }

  /** Offer the versions of the job's framework for which the cluster has images. */
  showVersions() {
    const { framework } = this.form.document;
    const versions = this.form.namespace?.versions[this.preset?.framework] ?? [];
    const control = this.form.root.querySelector("[data-version]");
    control.replaceChildren(new Option(gettext("Any"), ""), ...versions.map((version) => new Option(version, version)));
    this.form.selectOption(control, framework?.version ?? "");
    control.disabled = !framework || (!versions.length && !framework.version);
    this.form.showImageHint();
    this.form.root.querySelector("[data-version-hint]").textContent = framework && !versions.length ? gettext("The cluster has no image that states a version.") : "";
  }

  apply(value) {
    const [name, strategy] = value.split("/");
    const { framework } = this.form.document;
    const version = framework?.name === name ? framework.version : "";
    if (name) this.form.document.framework = { name, strategy, ...(version ? { version } : {}) };
    else delete this.form.document.framework;
    this.show();
    this.form.changed();
    if (name && this.form.distributed && this.lacksRoles()) this.applyRoles();
  }

  /** Set the framework's version, which selects the image in place of the job's own. */
  applyVersion(version) {
    const { framework } = this.form.document;
    this.form.document.framework = { ...(typeof framework === "string" ? { name: framework } : framework), version };
    if (version) this.form.document.image = "";
    this.form.fill(this.form.root.querySelector("#f-image"));
    this.form.showImageHint();
    this.form.changed();
  }

  lacksRoles() {
    const names = listRoles(this.form.document).map((role) => role.name);
    return this.preset.roles.some((role) => !names.includes(role.name));
  }

  /** Replace the roles by those of the preset. A role with the same name is kept; a new one is a copy of the first. */
  applyRoles() {
    const old = listRoles(this.form.document);
    const first = old[0] ?? {};
    this.form.document.taskRoles = this.preset.roles.map((presetRole) => {
      const sameName = old.find((role) => role.name === presetRole.name);
      if (sameName) return sameName;
      const role = structuredClone({ ...first, name: presetRole.name, taskNumber: presetRole.taskNumber, minSucceededTaskCount: presetRole.minSucceededTaskCount });
      delete role.isMain;
      delete role.title;
      if (presetRole.serves) { role.gpuNumber = 0; delete role.gpuType; }
      return role;
    });
    this.form.removedRoles = null;
    this.form.show();
    this.form.changed();
  }
}
