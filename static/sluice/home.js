// The home page renews itself: soon after an event of a job that one sees, and now and then for what is free.

import { followEvents, createFragmentRefresher } from "./live.js";

const REFRESH_INTERVAL_MS = 20000;
const refresh = createFragmentRefresher(document.querySelector("[data-home]").dataset.home);

followEvents({ onEvents: refresh, onReset: refresh });
setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_INTERVAL_MS);
