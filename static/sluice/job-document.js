// The job file as a document: read and write values by path (taskRoles[1].portList[0].beginAt), convert them to and
// from the text of form controls, store a draft in the browser's local storage. No DOM access.

import { durationInput, memoryInput, parseMemory } from "./format.js";

export function parsePath(path) {
  return path.match(/[^.[\]"]+/g)?.map((part) => (/^\d+$/.test(part) ? Number(part) : part)) ?? [];
}

export function readValue(document, path) {
  return parsePath(path).reduce((value, part) => (value === null || value === undefined ? undefined : value[part]), document);
}

/** Set a value and create missing parents. `undefined` removes the value and then parent mappings that are empty. */
export function writeValue(document, path, value) {
  const parts = parsePath(path);
  const ancestors = [document];
  parts.slice(0, -1).forEach((part, index) => {
    const parent = ancestors[index];
    if (typeof parent[part] !== "object" || parent[part] === null) {
      if (value === undefined) return;
      parent[part] = typeof parts[index + 1] === "number" ? [] : {};
    }
    ancestors.push(parent[part]);
  });
  if (ancestors.length < parts.length) return;
  const last = parts.at(-1);
  if (value !== undefined) { ancestors.at(-1)[last] = value; return; }
  if (Array.isArray(ancestors.at(-1))) ancestors.at(-1).splice(last, 1);
  else delete ancestors.at(-1)[last];
  // Remove empty mappings such as jobEnvs; empty lists stay.
  for (let depth = parts.length - 1; depth > 0; depth -= 1) {
    const ancestor = ancestors[depth];
    if (Array.isArray(ancestor) || Object.keys(ancestor).length) break;
    if (!Array.isArray(ancestors[depth - 1])) delete ancestors[depth - 1][parts[depth - 1]];
  }
}

export function isEqual(one, other) { return JSON.stringify(one) === JSON.stringify(other); }
export function listRoles(document) { return Array.isArray(document.taskRoles) ? document.taskRoles : []; }

/** Convert the text of a control to a document value. Invalid numbers stay text, which the check reports. */
export function parseValue(kind, text, { required = false, defaultValue } = {}) {
  const trimmed = text.trim();
  if (kind === "nullint" && trimmed === "") return null;
  if ((kind === "int" || kind === "memory") && trimmed === "") return "";
  if (trimmed === "") return required ? text : undefined;
  if (kind === "select") return text === defaultValue ? undefined : text;
  if (kind === "int" || kind === "nullint") return /^-?\d+$/.test(trimmed) ? Number(trimmed) : text;
  if (kind === "memory") return parseMemory(trimmed) ?? text;
  if (kind === "float") return Number.isFinite(Number(trimmed)) ? Number(trimmed) : text;
  if (kind === "list") return text.split(/[,;]/).map((part) => part.trim()).filter(Boolean);
  return text;
}

/** Convert a document value to the text of a control. */
export function formatValue(kind, value) {
  if (kind === "duration") return durationInput(value);
  if (kind === "memory") return memoryInput(value);
  if (kind === "list" && Array.isArray(value)) return value.join(", ");
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? "");
}

/** Return a name that no role of the document has: worker, worker2, worker3 … */
export function uniqueRoleName(document, base) {
  const names = listRoles(document).map((role) => role.name);
  if (!names.includes(base)) return base;
  let number = 2;
  while (names.includes(`${base}${number}`)) number += 1;
  return `${base}${number}`;
}

// --- drafts ---------------------------------------------------------------------------------------------

/** The draft of one user, stored in the browser. */
export class Draft {
  constructor(user) { this.key = `sluice.draft.${user}`; }

  load() {
    try {
      const stored = JSON.parse(localStorage.getItem(this.key));
      return stored && typeof stored.document === "object" ? stored : null;
    } catch { return null; }
  }

  save(content) {
    try { localStorage.setItem(this.key, JSON.stringify({ ...content, at: new Date().toISOString() })); } catch { /* storage is full or disabled */ }
  }

  remove() { try { localStorage.removeItem(this.key); } catch { /* storage is disabled */ } }
}

/** Return 32 random hexadecimal digits. crypto.randomUUID is not used, because browsers provide it only with TLS. */
export function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
