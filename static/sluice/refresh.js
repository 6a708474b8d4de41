// For pages with <div data-refresh-every-ms="milliseconds">: fetches the page's fragments at that interval.

import { createFragmentRefresher } from "./live.js";

const place = document.querySelector("[data-refresh-every-ms]");
const refresh = createFragmentRefresher(window.location.href);
setInterval(() => { if (!document.hidden) refresh(); }, Number(place.dataset.refreshEveryMs));
