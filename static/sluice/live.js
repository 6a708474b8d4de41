// Live updates: job events over one websocket per page, and page fragments fetched again.
// The websocket reconnects with back-off and resumes after the last event number, so that no event is
// lost or delivered twice.

import { localizeTimes } from "./times.js";

const FINAL_CLOSE_CODES = { 4401: "signed-out", 4403: "forbidden", 4404: "not-found", 4429: "too-many" };
const BACKOFF_MIN_MS = 500;
const BACKOFF_MAX_MS = 15000;
// Shorter interruptions show no banner.
const BANNER_AFTER_MS = 1500;
const RETRY_MS = 5000;

let bannerTimer = null;

function showConnected(yes) {
  const banner = document.getElementById("connection");
  if (!banner) return;
  clearTimeout(bannerTimer);
  if (yes) banner.hidden = true;
  else bannerTimer = setTimeout(() => { banner.hidden = false; }, BANNER_AFTER_MS);
}

/**
 * Call `onEvents(events)` for every batch of job events visible to the user, and `onReset()` when the
 * server can no longer resume: fetch the lists again then. Returns a function that stops following.
 */
export function followEvents({ onEvents, onReset = () => window.location.reload() }) {
  let number = null;
  let wait = BACKOFF_MIN_MS;
  let ended = false;
  let socket = null;
  let timer = null;

  function open() {
    timer = null;
    const scheme = window.location.protocol === "https:" ? "wss" : "ws";
    const since = number === null ? "" : `?since=${number}`;
    socket = new WebSocket(`${scheme}://${window.location.host}/ws/events${since}`);
    socket.addEventListener("message", (message) => {
      const frame = JSON.parse(message.data);
      wait = BACKOFF_MIN_MS;
      showConnected(true);
      if (frame.type === "events") {
        number = frame.events.at(-1).number;
        onEvents(frame.events);
      } else {
        number = frame.number;
        if (frame.type === "reset") onReset();
      }
    });
    socket.addEventListener("close", (event) => {
      if (ended) return;
      const reason = FINAL_CLOSE_CODES[event.code];
      if (reason === "signed-out") { window.location.reload(); return; }
      if (reason) return;
      showConnected(false);
      timer = setTimeout(open, wait * (0.75 + Math.random() / 2));
      wait = Math.min(wait * 2, BACKOFF_MAX_MS);
    });
  }

  // Reconnect at once when the page becomes visible or the network returns.
  const reconnectNow = () => {
    if (ended || timer === null || document.hidden) return;
    clearTimeout(timer);
    wait = BACKOFF_MIN_MS;
    open();
  };
  window.addEventListener("online", reconnectNow);
  document.addEventListener("visibilitychange", reconnectNow);
  // No reconnect while the page is being left.
  window.addEventListener("pagehide", () => { ended = true; socket?.close(); });
  window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });

  open();
  return () => { ended = true; clearTimeout(timer); socket?.close(); };
}

/** Fetch a fragment; after the end of the session, reload, which leads to the sign-in page and back. */
export async function fetchFragment(url) {
  const response = await fetch(url, { headers: { "Sluice-Fragment": "true" } });
  if (response.redirected && new URL(response.url).pathname.endsWith("/login")) {
    window.location.reload();
    throw new Error("signed out");
  }
  if (response.status === 401 || response.status === 404) window.location.reload();
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.text();
}

const shownHtml = new Map();

/** Replace the [data-fragment] elements of the page that changed, by id. Focus and scroll position stay. */
export function replaceFragments(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  let changed = false;
  for (const part of fresh.querySelectorAll("[data-fragment]")) {
    const old = document.getElementById(part.id);
    const text = part.outerHTML;
    if (!old || shownHtml.get(part.id) === text) continue;
    shownHtml.set(part.id, text);
    changed = true;
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = old.scrollTop;
    old.replaceWith(part);
    part.scrollTop = scrolled;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
  if (changed) localizeTimes();
  return changed;
}

/**
 * A function that fetches the page's fragments again: one request at a time, at most one per `everyMs`.
 * A call during a request causes another one after it.
 */
export function createFragmentRefresher(url, { everyMs = 1000, onChange = () => {} } = {}) {
  let running = false;
  let pending = false;
  async function refresh() {
    if (running) { pending = true; return; }
    running = true;
    pending = false;
    let pause = everyMs;
    try {
      if (replaceFragments(await fetchFragment(url))) onChange();
    } catch {
      pending = true;
      pause = Math.max(everyMs, RETRY_MS);
    }
    setTimeout(() => { running = false; if (pending) refresh(); }, pause);
  }
  return refresh;
}
