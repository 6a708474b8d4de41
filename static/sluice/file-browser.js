// The file browser of the job page: shows one directory of an attempt's files, with links to download them.

import { filesize } from "./format.js";
import { gettext, interpolate } from "./i18n.js";
import { localizeTimes } from "./times.js";

/** Return the entries of GET /api/v1/jobs/{id}/files with directories first, each group sorted by name. */
export function sortFiles(files) {
  return files.toSorted((a, b) => (b.kind === "dir") - (a.kind === "dir") || a.name.localeCompare(b.name));
}

export class FileBrowser {
  /** `attempt` is the attempt's number; empty: the newest attempt. `load()` shows the files for the first time. */
  constructor(place, jobId, attempt) {
    Object.assign(this, { place, jobId, attempt, root: "work", path: "" });
    this.find("[data-files-refresh]").addEventListener("click", () => this.load());
    const rootButtons = [...place.querySelectorAll("[data-files-root]")];
    for (const button of rootButtons) {
      button.addEventListener("click", () => {
        this.root = button.dataset.filesRoot;
        for (const other of rootButtons) other.setAttribute("aria-pressed", String(other === button));
        this.open("");
      });
    }
  }

  find(selector) { return this.place.querySelector(selector); }

  /** Build a URL of the REST API; `endpoint` is empty (list), /download or /tar. */
  url(endpoint, path) {
    const query = new URLSearchParams({ root: this.root });
    if (path) query.set("path", path);
    if (this.attempt) query.set("attempt", this.attempt);
    return `/api/v1/jobs/${this.jobId}/files${endpoint}?${query}`;
  }

  open(path) {
    this.path = path;
    this.load();
  }

  async load() {
    const status = this.find("[data-files-status]");
    status.hidden = false;
    status.textContent = gettext("Loading …");
    let body = {};
    let response = null;
    try {
      response = await fetch(this.url("", this.path), { headers: { Accept: "application/json" } });
      body = await response.json();
    } catch { /* reported below */ }
    this.showPath();
    const hasFiles = Boolean(body.items?.length);
    this.find("[data-files-card]").hidden = !hasFiles;
    const tar = this.find("[data-files-tar]");
    tar.hidden = !hasFiles;
    tar.href = this.url("/tar", this.path);
    if (!response?.ok) { status.textContent = body.detail ?? gettext("Cannot list the files. Try again later."); return; }
    status.textContent = hasFiles ? "" : gettext("No files.");
    status.hidden = hasFiles;
    this.find("[data-files]").replaceChildren(...sortFiles(body.items).map((file) => this.createRow(file)));
    localizeTimes();
  }

  createRow(file) {
    const row = document.createElement("tr");
    const name = document.createElement("td");
    const isDirectory = file.kind === "dir";
    if (isDirectory) name.append(createButton(`${file.name}/`, () => this.open(file.path)));
    else name.append(Object.assign(document.createElement("a"), { href: this.url("/download", file.path), download: file.name, textContent: file.name }));
    const size = Object.assign(document.createElement("td"), { className: "num", textContent: isDirectory ? "" : filesize(file.size) });
    const modified = document.createElement("td");
    const time = Object.assign(document.createElement("time"), { dateTime: file.modified_at });
    time.dataset.local = "";
    modified.append(time);
    row.append(name, size, modified);
    return row;
  }

  showPath() {
    const parts = this.path.split("/").filter(Boolean);
    this.find("[data-files-path]").replaceChildren(...[gettext("All files"), ...parts].map((part, index) => {
      const item = Object.assign(document.createElement("li"), { className: "breadcrumb-item" });
      const button = createButton(part, () => this.open(parts.slice(0, index).join("/")));
      button.setAttribute("aria-label", interpolate(gettext("Open %(name)s"), { name: part }));
      item.append(button);
      return item;
    }));
  }
}

function createButton(text, onClick) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "btn-link-plain", textContent: text });
  button.addEventListener("click", onClick);
  return button;
}
