// Translation functions of Django's JavaScript catalogue (/jsi18n, loaded before modules).
// Without the catalogue, as in unit tests, texts stay English.

export const gettext = globalThis.gettext ?? ((text) => text);
export const ngettext = globalThis.ngettext ?? ((one, many, count) => (count === 1 ? one : many));

/**
 * Fill the named parameters of a text: interpolate("%(count)s jobs", { count: 2 }).
 * The arguments of gettext and ngettext must be string literals, because makemessages extracts only these.
 */
export function interpolate(text, values) {
  return text.replace(/%\((\w+)\)s/g, (_, name) => String(values[name]));
}
