// The job file as a document: reading and changing it by path (taskRoles[1].portList[0].beginAt), and its draft.

export function parsePath(path) {
  return path.match(/[^.[\]"]+/g)?.map((part) => (/^\d+$/.test(part) ? Number(part) : part)) ?? [];
}

export function read(document, path) {
  return parsePath(path).reduce((value, part) => (value === null || value === undefined ? undefined : value[part]), document);
}

/** Set a value, making what is missing on the way; `undefined` removes it and what is then empty around it. */
export function write(document, path, value) {
  const parts = parsePath(path);
  const ancestors = [document];
  parts.slice(0, -1).forEach((part, index) => {
    const here = ancestors[index];
    if (typeof here[part] !== "object" || here[part] === null) {
      if (value === undefined) return;
      here[part] = typeof parts[index + 1] === "number" ? [] : {};
    }
    ancestors.push(here[part]);
  });
  if (ancestors.length < parts.length) return;
  const last = parts.at(-1);
  if (value !== undefined) { ancestors.at(-1)[last] = value; return; }
  if (Array.isArray(ancestors.at(-1))) ancestors.at(-1).splice(last, 1);
  else delete ancestors.at(-1)[last];
  // An emptied mapping such as jobEnvs goes too; lists of roles and the like stay.
  for (let depth = parts.length - 1; depth > 0; depth -= 1) {
    const here = ancestors[depth];
    if (Array.isArray(here) || Object.keys(here).length) break;
    if (!Array.isArray(ancestors[depth - 1])) delete ancestors[depth - 1][parts[depth - 1]];
  }
}

export function copy(value) { return structuredClone(value); }
export function same(one, other) { return JSON.stringify(one) === JSON.stringify(other); }
export function roles(document) { return Array.isArray(document.taskRoles) ? document.taskRoles : []; }

/** Seconds as people write them: 9000 → 2h30m. Text stays as it is. */
export function durationText(value) {
  if (typeof value !== "number") return value ?? "";
  const parts = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
  let left = value;
  const words = parts.map(([unit, size]) => {
    const count = Math.floor(left / size);
    left %= size;
    return count ? `${count}${unit}` : "";
  });
  return words.join("") || "0s";
}

// --- drafts: in this browser, one per person -----------------------------------------------------------

export class Draft {
  constructor(user) { this.key = `sluice.draft.${user}`; }

  load() {
    try {
      const found = JSON.parse(localStorage.getItem(this.key));
      return found && typeof found.document === "object" ? found : null;
    } catch { return null; }
  }

  save(content) {
    try { localStorage.setItem(this.key, JSON.stringify({ ...content, at: new Date().toISOString() })); } catch { /* full or forbidden: no draft */ }
  }

  forget() { try { localStorage.removeItem(this.key); } catch { /* nothing was kept */ } }
}

/** Also where the page is not a secure context, which has no randomUUID. */
export function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
