// The Ace editor for job files: JSON or YAML, problems as line annotations, completion from the schema.
// Ace is loaded on first use, without workers and eval, because the Content-Security-Policy forbids both.

import { gettext } from "./i18n.js";
import { listCompletions } from "./job-schema.js";

let aceLoading = null;

function loadScript(url) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = url;
    script.async = false;
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error(url)));
    document.head.append(script);
  });
}

function currentTheme() { return document.documentElement.dataset.bsTheme === "dark" ? "ace/theme/github_dark" : "ace/theme/github_light_default"; }

/**
 * Open an editor in `place`. With `lines` = [min, max] its height follows the number of lines. `onChange(text)` is
 * called for edits by the user, but not for `setText`.
 */
export async function openEditor(place, { ace: scripts, schema, format = "yaml", text = "", readOnly = false, lines = null, label, onChange }) {
  aceLoading ??= Promise.all(scripts.map(loadScript));
  await aceLoading;
  const { ace } = window;
  const editor = ace.edit(place, {
    theme: currentTheme(),
    useWorker: false,
    showPrintMargin: false,
    fontSize: 13,
    tabSize: 2,
    useSoftTabs: true,
    wrap: false,
    enableKeyboardAccessibility: true,
    enableBasicAutocompletion: [createCompleter(schema)],
    enableLiveAutocompletion: [createCompleter(schema)],
    readOnly,
    ...(lines ? { minLines: lines[0], maxLines: lines[1] } : {}),
  });
  editor.session.setUseWorker(false);
  editor.textInput.getElement().setAttribute("aria-label", label ?? gettext("Job file"));
  new MutationObserver(() => editor.setTheme(currentTheme())).observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });
  let ignoreChanges = false;
  editor.session.on("change", () => { if (!ignoreChanges) onChange?.(editor.getValue()); });

  const handle = {
    editor,
    get text() { return editor.getValue(); },
    setFormat(name) { editor.session.setMode(`ace/mode/${name}`); },
    setText(value) {
      if (editor.getValue() === value) return;
      ignoreChanges = true;
      const { row, column } = editor.getCursorPosition();
      editor.session.doc.setValue(value);
      editor.moveCursorTo(Math.min(row, editor.session.getLength() - 1), column);
      editor.clearSelection();
      ignoreChanges = false;
    },
    setProblems(problems, warnings = []) {
      const rows = [...problems.map((problem) => ({ ...problem, type: "error" })), ...warnings.map((warning) => ({ ...warning, type: "warning" }))];
      editor.session.setAnnotations(rows.filter(({ line, path }) => line || !path).map(({ line, column, path, message, type }) => ({
        row: (line ?? 1) - 1, column: (column ?? 1) - 1, type, text: path ? `${path}: ${message}` : message,
      })));
    },
    goTo(line, column = 1) { editor.focus(); editor.gotoLine(line, Math.max(0, column - 1), true); },
    insert(value) { editor.insert(value); editor.focus(); },
    resize() { editor.resize(true); },
  };
  handle.setFormat(format);
  handle.setText(text);
  editor.session.getUndoManager().reset();
  return handle;
}

let schemaPromise = null;

function loadSchema(url) {
  schemaPromise ??= fetch(url, { headers: { Accept: "application/json" } }).then((response) => (response.ok ? response.json() : null)).catch(() => null);
  return schemaPromise;
}

function createCompleter(url) {
  return {
    identifierRegexps: [/[\w]/],
    async getCompletions(editor, session, position, prefix, done) {
      const schema = await loadSchema(url);
      if (!schema) { done(null, []); return; }
      const line = session.getLine(position.row).slice(0, position.column);
      const isJson = session.getMode().$id.endsWith("json");
      done(null, listCompletions(schema, { lines: session.getLines(0, position.row), line, prefix, isJson }));
    },
  };
}
