// Live updates: receives job events over one websocket per page, and fetches page fragments again.
// The websocket reconnects with back-off and continues after the last event number, so that no event is lost or
// delivered twice.

import { gettext } from "./i18n.js";
import { localizeTimes } from "./times.js";

// Close codes of the server. After the final ones, reconnecting would fail again.
const SIGNED_OUT = 4401;
const FINAL_CLOSE_CODES = [4403, 4404]; // forbidden, not found
const HANDSHAKE_FAILED = 1006; // the browser's code if the server refused the handshake or the connection broke
const BACKOFF_MIN_MS = 500;
const BACKOFF_MAX_MS = 15000;
// The banner about a lost connection appears only after this time.
const BANNER_AFTER_MS = 1500;
const FRAGMENT_RETRY_MS = 5000;

/** Delays between attempts to reconnect: doubled after each failure, and varied, so that not all pages reconnect at once. */
export class Backoff {
  waitMs = BACKOFF_MIN_MS;

  reset() { this.waitMs = BACKOFF_MIN_MS; }

  nextDelayMs() {
    const delayMs = this.waitMs * (0.75 + Math.random() / 2);
    this.waitMs = Math.min(this.waitMs * 2, BACKOFF_MAX_MS);
    return delayMs;
  }
}

/** Open a websocket at a path of this site. */
export function openWebSocket(path) {
  const scheme = window.location.protocol === "https:" ? "wss" : "ws";
  return new WebSocket(`${scheme}://${window.location.host}${path}`);
}

/**
 * Return why websockets fail, which a browser does not tell a page: "signed-out"; "refused" if the server responds but
 * refuses the websocket, because the person has too many; "unreachable".
 */
export async function findSocketProblem() {
  try {
    const response = await fetch("/api/v1/me", { headers: { Accept: "application/json" } });
    if (response.status === 401) return "signed-out";
    return response.ok ? "refused" : "unreachable";
  } catch {
    return "unreachable";
  }
}

let bannerTimer = null;

function showConnected(isConnected) {
  const banner = document.getElementById("connection");
  if (!banner) return;
  clearTimeout(bannerTimer);
  if (isConnected) banner.hidden = true;
  else bannerTimer = setTimeout(() => { banner.hidden = false; }, BANNER_AFTER_MS);
}

/** Write the reason into the banner: too many websockets, or else a lost connection. */
function explainConnection(isRefused) {
  const banner = document.getElementById("connection");
  if (!banner) return;
  banner.dataset.lost ??= banner.textContent;
  banner.textContent = isRefused
    ? gettext("Too many pages are open, so this one does not update by itself. Close some; it tries again automatically.")
    : banner.dataset.lost;
}

/**
 * Call `onEvents(events)` for every batch of job events visible to the user. `onReset()` is called when the server
 * can no longer send the missed events, so that the page must fetch its data again.
 */
export function followEvents({ onEvents, onReset }) {
  const backoff = new Backoff();
  let lastNumber = null; // number of the last received event
  let leavingPage = false;
  let socket = null;
  let timer = null; // set while the page waits to reconnect

  function open() {
    timer = null;
    let accepted = false;
    socket = openWebSocket(`/ws/events${lastNumber === null ? "" : `?since=${lastNumber}`}`);
    socket.addEventListener("message", (message) => {
      const frame = JSON.parse(message.data);
      backoff.reset();
      showConnected(true);
      if (frame.type === "events") {
        lastNumber = frame.events.at(-1).number;
        onEvents(frame.events);
      } else {
        lastNumber = frame.number;
        if (frame.type === "reset") onReset();
      }
    });
    socket.addEventListener("close", ({ code }) => {
      if (leavingPage || FINAL_CLOSE_CODES.includes(code)) return;
      if (code === SIGNED_OUT) { window.location.reload(); return; }
      showConnected(false);
      timer = setTimeout(open, backoff.nextDelayMs());
      if (!accepted && code === HANDSHAKE_FAILED) explainRefusal();
    });
    socket.addEventListener("open", () => { accepted = true; });
  }

  async function explainRefusal() {
    const problem = await findSocketProblem();
    if (problem === "signed-out" && !leavingPage) window.location.reload();
    explainConnection(problem === "refused");
  }

  // Reconnect immediately when the page becomes visible or the network returns.
  const reconnectNow = () => {
    if (leavingPage || timer === null || document.hidden) return;
    clearTimeout(timer);
    backoff.reset();
    open();
  };
  window.addEventListener("online", reconnectNow);
  document.addEventListener("visibilitychange", reconnectNow);
  window.addEventListener("pagehide", () => { leavingPage = true; socket?.close(); });
  // Reload a page that the browser's back button restores: its websocket is closed.
  window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });

  open();
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

const shownHtml = new Map(); // id of a fragment → HTML that the server sent for it last

/** Replace the [data-fragment] elements whose HTML changed; keeps focus and scroll position. Returns whether any changed. */
function replaceFragments(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  let changed = false;
  for (const part of fresh.querySelectorAll("[data-fragment]")) {
    const old = document.getElementById(part.id);
    const text = part.outerHTML;
    if (!old || shownHtml.get(part.id) === text) continue;
    shownHtml.set(part.id, text);
    changed = true;
    const focusedId = old.contains(document.activeElement) ? document.activeElement.id : "";
    const { scrollTop } = old;
    old.replaceWith(part);
    part.scrollTop = scrollTop;
    if (focusedId) document.getElementById(focusedId)?.focus({ preventScroll: true });
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
    let pauseMs = everyMs;
    try {
      if (replaceFragments(await fetchFragment(url))) onChange();
    } catch {
      pending = true;
      pauseMs = Math.max(everyMs, FRAGMENT_RETRY_MS);
    }
    setTimeout(() => { running = false; if (pending) refresh(); }, pauseMs);
  }
  return refresh;
}
