// Ace for job files: JSON or YAML, marks at the lines of problems, completion from the job file's schema.
// Loaded when first needed. No workers and no evaluated code: the page's policy forbids both.

const gettext = window.gettext;
let loading = null;

function loadScript(address) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = address;
    script.async = false;
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error(address)));
    document.head.append(script);
  });
}

function dark() { return document.documentElement.dataset.bsTheme === "dark"; }
function theme() { return dark() ? "ace/theme/github_dark" : "ace/theme/github_light_default"; }

/** An editor in `place`, as high as it is or as its `lines` [least, most]; `onChange(text)` only for what is typed. */
export async function openEditor(place, { ace: addresses, schema, format = "yaml", text = "", readOnly = false, lines = null, label, onChange }) {
  loading ??= Promise.all(addresses.map(loadScript));
  await loading;
  const { ace } = window;
  const editor = ace.edit(place, {
    theme: theme(),
    useWorker: false,
    showPrintMargin: false,
    fontSize: 13,
    tabSize: 2,
    useSoftTabs: true,
    wrap: false,
    enableKeyboardAccessibility: true,
    enableBasicAutocompletion: [completer(schema)],
    enableLiveAutocompletion: [completer(schema)],
    readOnly,
    ...(lines ? { minLines: lines[0], maxLines: lines[1] } : {}),
  });
  editor.session.setUseWorker(false);
  editor.textInput.getElement().setAttribute("aria-label", label ?? gettext("Job file"));
  new MutationObserver(() => editor.setTheme(theme())).observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });
  let quiet = false;
  editor.session.on("change", () => { if (!quiet) onChange?.(editor.getValue()); });

  const handle = {
    editor,
    get text() { return editor.getValue(); },
    setFormat(name) { editor.session.setMode(`ace/mode/${name}`); },
    setText(value) {
      if (editor.getValue() === value) return;
      quiet = true;
      const { row, column } = editor.getCursorPosition();
      editor.session.doc.setValue(value);
      editor.moveCursorTo(Math.min(row, editor.session.getLength() - 1), column);
      editor.clearSelection();
      quiet = false;
    },
    setProblems(problems, warnings = []) {
      const rows = [...problems.map((one) => [one, "error"]), ...warnings.map((one) => [one, "warning"])];
      editor.session.setAnnotations(rows.filter(([one]) => one.line || !one.path).map(([one, type]) => ({
        row: (one.line ?? 1) - 1, column: (one.column ?? 1) - 1, type, text: one.path ? `${one.path}: ${one.message}` : one.message,
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

// --- completion ------------------------------------------------------------------------------------------

let schemaPromise = null;

function loadSchema(address) {
  schemaPromise ??= fetch(address, { headers: { Accept: "application/json" } }).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
  return schemaPromise;
}

function resolve(schema, root) {
  if (!schema) return null;
  if (schema.$ref) return resolve(root.$defs?.[schema.$ref.split("/").at(-1)], root);
  const other = (schema.anyOf ?? schema.oneOf ?? []).find((one) => one.type !== "null");
  return other ? resolve(other, root) : schema;
}

/** The schema of the mapping at a path of keys; lists are passed through. */
function schemaAt(root, keys) {
  let here = resolve(root, root);
  for (const key of keys) {
    while (here?.type === "array") here = resolve(here.items, root);
    here = resolve(here?.properties?.[key] ?? (typeof here?.additionalProperties === "object" ? here.additionalProperties : null), root);
  }
  while (here?.type === "array") here = resolve(here.items, root);
  return here;
}

/** The keys around a place of a YAML text, by indentation. */
function yamlKeys(lines, row, indent) {
  const keys = [];
  let below = indent;
  for (let number = row - 1; number >= 0 && below > 0; number -= 1) {
    const found = /^(\s*)((?:- +)*)([\w]+):/.exec(lines[number]);
    if (!found) continue;
    const at = found[1].length + found[2].length;
    if (at < below && /:\s*(#.*)?$/.test(lines[number])) { keys.unshift(found[3]); below = found[1].length; if (found[2]) below = found[1].length; }
    else if (found[2] && found[1].length < below) below = Math.min(below, found[1].length + 0.5);
  }
  return keys;
}

/** The keys around a place of a JSON text, by brackets. */
function jsonKeys(before) {
  const keys = [];
  const open = [];
  let last = null;
  for (const token of before.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]/g) ?? []) {
    if (token === "{" || token === "[") { open.push(last); last = null; }
    else if (token === "}" || token === "]") { open.pop(); last = null; }
    else if (token === ",") last = null;
    else if (token !== ":" && last === null) last = token.slice(1, -1);
  }
  for (const key of open) if (key) keys.push(key);
  return keys;
}

function completer(address) {
  return {
    identifierRegexps: [/[\w]/],
    async getCompletions(editor, session, position, prefix, done) {
      const root = await loadSchema(address);
      if (!root) { done(null, []); return; }
      const line = session.getLine(position.row).slice(0, position.column);
      const isJson = session.getMode().$id.endsWith("json");
      const lines = session.getLines(0, position.row);
      const beforeWord = line.slice(0, line.length - prefix.length);
      const afterKey = /(\w+)"?\s*:\s*"?$/.exec(beforeWord);
      const keys = isJson
        ? jsonKeys([...lines.slice(0, -1), beforeWord].join("\n"))
        : yamlKeys(lines, position.row, /^(\s*(?:- +)*)/.exec(line)[1].length);
      const here = schemaAt(root, keys);
      done(null, afterKey ? values(resolve(here?.properties?.[afterKey[1]], root)) : fields(here, isJson, beforeWord));
    },
  };
}

function values(schema) {
  const known = schema?.enum ?? (schema?.type === "boolean" ? [true, false] : []);
  return known.map((value) => ({ value: String(value), meta: gettext("value"), score: 1000 }));
}

function fields(schema, isJson, before) {
  const quoted = isJson && /"$/.test(before);
  return Object.entries(schema?.properties ?? {}).map(([name, field]) => ({
    caption: name,
    value: isJson ? (quoted ? name : `"${name}": `) : `${name}: `,
    meta: gettext("field"),
    docText: field.description,
    score: 1000,
  }));
}
