// Job events as they happen, over one websocket per page. Comes back by itself after a loss and asks
// from the last number it saw, so nothing is missed and nothing comes twice.

const CLOSED_FOR_GOOD = { 4401: "signed-out", 4403: "forbidden", 4404: "not-found", 4429: "too-many" };
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;

/**
 * Call `onEvents(events)` for every batch of job events that this person may see, and `onReset()` when
 * the page was away for too long and should fetch its lists again. Returns a function that ends it.
 */
export function followEvents({ onEvents, onReset = () => window.location.reload() }) {
  let number = null;
  let wait = FIRST_WAIT_MS;
  let ended = false;
  let socket = null;
  const banner = document.getElementById("connection");
  const connected = (yes) => { if (banner) banner.hidden = yes; };

  function open() {
    const scheme = window.location.protocol === "https:" ? "wss" : "ws";
    const since = number === null ? "" : `?since=${number}`;
    socket = new WebSocket(`${scheme}://${window.location.host}/ws/events${since}`);
    socket.addEventListener("message", (message) => {
      const frame = JSON.parse(message.data);
      wait = FIRST_WAIT_MS;
      connected(true);
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
      const reason = CLOSED_FOR_GOOD[event.code];
      if (reason === "signed-out") { window.location.reload(); return; }
      if (reason) return;
      connected(false);
      setTimeout(open, wait * (0.75 + Math.random() / 2));
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    });
  }

  open();
  return () => { ended = true; socket?.close(); };
}
