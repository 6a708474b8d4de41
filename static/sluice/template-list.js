// The list of templates: select several to delete them.

import { interpolate, ngettext } from "./i18n.js";
import { RowSelection } from "./selection.js";

const list = document.getElementById("template-list");
const bar = document.getElementById("template-batch");
if (list) new RowSelection(list, bar, (count) => interpolate(ngettext("%(count)s selected", "%(count)s selected", count), { count }));
