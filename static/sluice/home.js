// The home page renews itself: soon after an event of a job that one sees, and now and then for what is free.

import { followEvents, partsRenewer } from "./live.js";

const LOOK_MS = 20000;
const renew = partsRenewer(document.querySelector("[data-home]").dataset.home);

followEvents({ onEvents: renew, onReset: renew });
setInterval(() => { if (!document.hidden) renew(); }, LOOK_MS);
