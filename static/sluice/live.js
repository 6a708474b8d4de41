// Live updates: receives job events over one websocket per page, and fetches page fragments again.
// The websocket reconnects with back-off and continues after the last event number, so that no event is lost or
// delivered twice.

import { localizeTimes } from "./times.js";

const FINAL_CLOSE_CODES = { 4401: "signed-out", 4403: "forbidden", 4404: "not-found", 4429: "too-many" };
const BACKOFF_MIN_MS = 500;
const BACKOFF_MAX_MS = 15000;
// The banner about a lost connection appears only after this time.
const BANNER_AFTER_MS = 1500;
const FRAGMENT_RETRY_MS = 5000;

let bannerTimer = null;

function showConnected(isConnected) {
  const banner = document.getElementById("connection");
  if (!banner) return;
  clearTimeout(bannerTimer);
  if (isConnected) banner.hidden = true;
  else bannerTimer = setTimeout(() => { banner.hidden = false; }, BANNER_AFTER_MS);
}

/**
 * Call `onEvents(events)` for every batch of job events visible to the user. `onReset()` is called when the server
 * can no longer send the missed events, so that the page must fetch its data again. Returns a function that stops this.
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

  // Reconnect immediately when the page becomes visible or the network returns.
  const reconnectNow = () => {
    if (ended || timer === null || document.hidden) return;
    clearTimeout(timer);
    wait = BACKOFF_MIN_MS;
    open();
  };
  window.addEventListener("online", reconnectNow);
  document.addEventListener("visibilitychange", reconnectNow);
  // Do not reconnect while the person leaves the page.
  window.addEventListener("pagehide", () => { ended = true; socket?.close(); });
  window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });

  open();
  return () => { ended = true; clearTimeout(timer); socket?.close(); };
}

/** Fetch a fragment. If the session has ended, reload the page, which redirects to the sign-in page. */
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

/** Replace the [data-fragment] elements whose HTML changed; keeps focus and scroll position. Returns whether any changed. */
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
 * Return a function that fetches the page's fragments again: one request at a time, at most one per `everyMs`.
 * If it is called during a request, another request follows.
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
      pause = Math.max(everyMs, FRAGMENT_RETRY_MS);
    }
    setTimeout(() => { running = false; if (pending) refresh(); }, pause);
  }
  return refresh;
}
