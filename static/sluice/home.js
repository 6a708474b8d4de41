// The home page: fetches its fragments after job events, and periodically because the free capacity changes.

import { followEvents, createFragmentRefresher } from "./live.js";

const REFRESH_INTERVAL_MS = 20000;
const refresh = createFragmentRefresher(document.querySelector("[data-home]").dataset.home);

followEvents({ onEvents: refresh, onReset: refresh });
setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_INTERVAL_MS);
