// Pages whose parts are fetched again from their own address: <div data-renew-every="milliseconds">.

import { partsRenewer } from "./live.js";

const place = document.querySelector("[data-renew-every]");
const renew = partsRenewer(window.location.href);
setInterval(() => { if (!document.hidden) renew(); }, Number(place.dataset.renewEvery));
