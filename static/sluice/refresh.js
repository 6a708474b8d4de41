// Pages that refresh their own fragments at an interval: <div data-refresh-every-ms="milliseconds">.

import { createFragmentRefresher } from "./live.js";

const place = document.querySelector("[data-refresh-every-ms]");
const refresh = createFragmentRefresher(window.location.href);
setInterval(() => { if (!document.hidden) refresh(); }, Number(place.dataset.refreshEveryMs));
