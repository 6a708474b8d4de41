// What changes while one looks: job events over one websocket per page, and parts of the page that are
// fetched again. Comes back by itself after a loss and asks from the last number it saw, so that nothing
// is missed and nothing comes twice.

const FINAL_CLOSE_CODES = { 4401: "signed-out", 4403: "forbidden", 4404: "not-found", 4429: "too-many" };
const BACKOFF_MIN_MS = 500;
const BACKOFF_MAX_MS = 15000;
// A loss shorter than this is nobody's concern: no banner flashes by.
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
 * Call `onEvents(events)` for every batch of job events that this person may see, and `onReset()` when
 * the page was away for too long and should fetch its lists again. Returns a function that ends it.
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

  // Who comes back to the page wants it now, not after the longest wait.
  const reconnectNow = () => {
    if (ended || timer === null || document.hidden) return;
    clearTimeout(timer);
    wait = BACKOFF_MIN_MS;
    open();
  };
  window.addEventListener("online", reconnectNow);
  document.addEventListener("visibilitychange", reconnectNow);
  // A page that is left closes quietly.
  window.addEventListener("pagehide", () => { ended = true; socket?.close(); });
  window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });

  open();
  return () => { ended = true; clearTimeout(timer); socket?.close(); };
}

/** Fetch text of ours; a session that has ended leads to the sign-in and back here. */
export async function fetchText(address) {
  const answer = await fetch(address, { headers: { "HX-Request": "true" } });
  if (answer.redirected && new URL(answer.url).pathname.endsWith("/login")) {
    window.location.reload();
    throw new Error("signed out");
  }
  if (answer.status === 401 || answer.status === 404) window.location.reload();
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.text();
}

const last = new Map();

/** Put fresh HTML in place of the elements of the same id that it holds; those that did not change stay. */
export function replaceFragments(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  let changed = false;
  for (const part of fresh.querySelectorAll("[data-fragment]")) {
    const old = document.getElementById(part.id);
    const text = part.outerHTML;
    if (!old || last.get(part.id) === text) continue;
    last.set(part.id, text);
    changed = true;
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = old.scrollTop;
    old.replaceWith(part);
    part.scrollTop = scrolled;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
  if (changed) document.dispatchEvent(new Event("sluice:times"));
  return changed;
}

/**
 * A function that fetches the page's parts again: at most one request at a time, at most one every
 * `everyMs`, and the last call is always served.
 */
export function createFragmentRefresher(address, { everyMs = 1000, onChange = () => {} } = {}) {
  let running = false;
  let pending = false;
  async function refresh() {
    if (running) { pending = true; return; }
    running = true;
    pending = false;
    let pause = everyMs;
    try {
      if (replaceFragments(await fetchText(address))) onChange();
    } catch {
      pending = true;
      pause = Math.max(everyMs, RETRY_MS);
    }
    setTimeout(() => { running = false; if (pending) refresh(); }, pause);
  }
  return refresh;
}
