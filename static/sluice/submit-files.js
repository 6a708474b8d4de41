// Files of the submit page: import and export of job files, drag and drop, upload of code.

import { gettext, interpolate } from "./i18n.js";
import { fillList } from "./submit-sidebar.js";

const ARCHIVE_NAME = /\.(zip|tar|tgz|gz)$/i;

export function showImport(root, filename, response) {
  const bar = root.querySelector("[data-import-bar]");
  bar.hidden = false;
  bar.querySelector("[data-title]").textContent = interpolate(gettext("%(file)s was imported as %(format)s."), { file: filename || gettext("The text"), format: response.dialectTitle });
  const lines = (response.warnings ?? []).map((warning) => [warning.line ? interpolate(gettext("line %(line)s"), { line: warning.line }) : "", warning.path, warning.message].filter(Boolean).join(": "));
  fillList(bar.querySelector("[data-warnings]"), lines);
}

/** Let the browser download the text as a file. */
export function saveFile(text, jobName, format) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: format === "json" ? "application/json" : "application/yaml" }));
  link.download = `${String(jobName || "job").replace(/[^\p{L}\p{N}._~-]/gu, "_")}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Handle the import button and drag and drop: `onText(text, filename)` for job files, `onArchive(file)` for code. */
export function acceptFiles(root, { onText, onArchive }) {
  const picker = root.querySelector("[data-import-file]");
  const overlay = root.querySelector("[data-drop]");
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0; // number of entered elements: dragenter and dragleave fire for every element below the pointer

  root.querySelector("[data-import]").addEventListener("click", () => picker.click());
  root.querySelector("[data-import-close]").addEventListener("click", () => { root.querySelector("[data-import-bar]").hidden = true; });
  picker.addEventListener("change", async () => {
    const [file] = picker.files;
    if (file) await onText(await file.text(), file.name);
    picker.value = "";
  });
  document.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; overlay.hidden = false; } });
  document.addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); overlay.hidden = depth === 0; });
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", async (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    overlay.hidden = true;
    const [file] = event.dataTransfer.files;
    if (file && ARCHIVE_NAME.test(file.name)) onArchive(file);
    else if (file) await onText(await file.text(), file.name);
  });
}

/** Upload an archive with a progress bar; resolves to { status, body }. Uses XMLHttpRequest, because fetch reports no upload progress. */
export function uploadArchive(root, url, csrf, file) {
  const bar = root.querySelector("[data-upload-bar]");
  const status = root.querySelector("[data-upload-status]");
  bar.hidden = false;
  status.textContent = gettext("Uploading …");
  return new Promise((resolve) => {
    const request = new XMLHttpRequest();
    request.open("POST", `${url}?filename=${encodeURIComponent(file.name)}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-CSRFToken", csrf);
    request.upload.addEventListener("progress", (event) => { if (event.lengthComputable) bar.firstElementChild.style.width = `${(100 * event.loaded) / event.total}%`; });
    request.addEventListener("loadend", () => {
      bar.hidden = true;
      let body = {};
      try { body = JSON.parse(request.responseText); } catch { /* the response is not JSON; the status is enough */ }
      if (request.status !== 201) status.textContent = body.detail ?? gettext("The upload failed. Try again.");
      resolve({ status: request.status, body });
    });
    request.send(file);
  });
}

export function showUpload(root, upload) {
  root.querySelector("[data-upload-status]").textContent = upload
    ? interpolate(gettext("%(name)s uploaded (%(files)s files). It is unpacked into MODEL_DIR, the working directory."), { name: upload.name, files: upload.files })
    : "";
}
