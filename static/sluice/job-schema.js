// Completes job files from their JSON schema: finds the keys and values for a position in a YAML or JSON text.
// Labels and descriptions come from the schema, in the page's language. Independent of the editor.

import { gettext } from "./i18n.js";

/** Follow references, and for a nullable value return the schema of the value that is not null. */
function resolve(schema, root) {
  if (!schema) return null;
  if (schema.$ref) return resolve(root.$defs?.[schema.$ref.split("/").at(-1)], root);
  const other = (schema.anyOf ?? schema.oneOf ?? []).find((one) => one.type !== "null");
  return other ? resolve(other, root) : schema;
}

/** Return the schema of the mapping at a path of keys. The path has no indices for list items. */
export function findSchemaAt(root, keys) {
  let here = resolve(root, root);
  for (const key of keys) {
    while (here?.type === "array") here = resolve(here.items, root);
    here = resolve(here?.properties?.[key] ?? (typeof here?.additionalProperties === "object" ? here.additionalProperties : null), root);
  }
  while (here?.type === "array") here = resolve(here.items, root);
  return here;
}

/** Find the keys that enclose a line of a YAML text, by indentation. */
export function findYamlKeys(lines, row, indent) {
  const keys = [];
  let below = indent;
  for (let number = row - 1; number >= 0 && below > 0; number -= 1) {
    const found = /^(\s*)((?:- +)*)([\w]+):/.exec(lines[number]);
    if (!found) continue;
    const at = found[1].length + found[2].length;
    if (at < below && /:\s*(#.*)?$/.test(lines[number])) { keys.unshift(found[3]); below = found[1].length; }
    else if (found[2] && found[1].length < below) below = Math.min(below, found[1].length + 0.5);
  }
  return keys;
}

/** Find the keys that enclose the end of a JSON text, by brackets. */
export function findJsonKeys(before) {
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

/** List the completions at the end of `line`, the last of `lines`, up to the cursor. `prefix` is the word being typed. */
export function listCompletions(root, { lines, line, prefix, isJson }) {
  const beforeWord = line.slice(0, line.length - prefix.length);
  const afterKey = /(\w+)"?\s*:\s*"?$/.exec(beforeWord);
  const keys = isJson
    ? findJsonKeys([...lines.slice(0, -1), beforeWord].join("\n"))
    : findYamlKeys(lines, lines.length - 1, /^(\s*(?:- +)*)/.exec(line)[1].length);
  const here = findSchemaAt(root, keys);
  return afterKey ? completeValues(resolve(here?.properties?.[afterKey[1]], root)) : completeFields(here, isJson, beforeWord);
}

function completeValues(schema) {
  const values = schema?.enum ?? (schema?.type === "boolean" ? [true, false] : []);
  return values.map((value) => ({ value: String(value), meta: gettext("value"), score: 1000 }));
}

function completeFields(schema, isJson, before) {
  const quoted = isJson && /"$/.test(before);
  return Object.entries(schema?.properties ?? {}).map(([name, field]) => ({
    caption: name,
    value: isJson ? (quoted ? name : `"${name}": `) : `${name}: `,
    meta: gettext("field"),
    docText: field.description,
    score: 1000,
  }));
}
