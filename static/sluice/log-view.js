// <log-view data-job data-role data-index [data-attempt]>: shows one growing log in a terminal.
// The terminal contains a part of the log: first the end, and earlier parts on demand. The bytes come over a websocket,
// which continues at the last offset after an interruption; search and download use the REST API.

import { Terminal } from "../vendor/xterm/xterm.mjs";
import { FitAddon } from "../vendor/xterm/addon-fit.mjs";
import { SearchAddon } from "../vendor/xterm/addon-search.mjs";
import { Unicode11Addon } from "../vendor/xterm/addon-unicode11.mjs";
import { gettext, interpolate } from "./i18n.js";
import { Backoff, findSocketProblem, openWebSocket } from "./live.js";

const FIRST_BYTES = 256 * 1024; // loaded from the end when a log is opened
const EARLIER_BYTES = 1024 * 1024; // loaded by each click on "Earlier"
const MAX_UNRENDERED_BYTES = 8 * 1024 * 1024; // if more bytes wait for rendering, skip to the end
const SCROLLBACK_LINES = 20000;
const CONTEXT_BYTES = 4096; // shown before a search match
const WIDE_COLUMNS = 500; // terminal width without line wrapping
// A log is untrusted text. These sequences of it have no effect: window and icon title, colours of the palette,
// links, notifications, clipboard, and their resets.
const IGNORED_OSC = [0, 1, 2, 4, 5, 8, 9, 10, 11, 12, 50, 52, 99, 104, 105, 110, 111, 112, 133, 777, 1337];
// Of the private modes only: wrap lines (7), show the cursor (25). Others would hide the log behind the alternate
// screen or send the mouse to it, so that text could not be selected.
const ALLOWED_PRIVATE_MODES = new Set([7, 25]);

const THEMES = {
  light: { background: "#ffffff", foreground: "#1f2937", cursor: "#ffffff", selectionBackground: "#bcd7f5", black: "#1f2937", red: "#b42318", green: "#1a7f37", yellow: "#8a5a00", blue: "#0550ae", magenta: "#8250df", cyan: "#0b6b75", white: "#57606a" },
  dark: { background: "#16181d", foreground: "#d6d9de", cursor: "#16181d", selectionBackground: "#35506f" },
};

class LogView extends HTMLElement {
  connectedCallback() {
    this.offset = -FIRST_BYTES; // offset of the next byte; a negative offset counts from the end
    this.start = 0; // offset of the first byte in the terminal
    this.unrenderedBytes = 0;
    this.backoff = new Backoff();
    this.wrapped = true;
    this.finished = false; // true if the server sends no more bytes, so that a closed websocket is not opened again
    this.build();
    this.open();
  }

  disconnectedCallback() {
    this.finished = true;
    clearTimeout(this.timer);
    this.socket?.close();
    this.resizeObserver.disconnect();
    this.themeObserver.disconnect();
    this.terminal.dispose();
  }

  get name() { return `${this.dataset.role}-${this.dataset.index}`; }
  get restUrl() { return `/api/v1/jobs/${this.dataset.job}/logs/${encodeURIComponent(this.dataset.role)}/${this.dataset.index}`; }

  // --- elements -------------------------------------------------------------------------------

  build() {
    this.innerHTML = "";
    this.classList.add("log-view");
    const bar = document.createElement("div");
    bar.className = "log-bar";
    this.status = element("span", "log-status text-secondary", { role: "status" });
    this.find = element("input", "form-control form-control-sm log-find", { type: "search", placeholder: gettext("Search"), "aria-label": gettext("Search this log") });
    this.toEnd = button(gettext("Jump to end"), () => this.jumpToEnd());
    this.toEnd.hidden = true;
    this.earlier = button(gettext("Earlier"), () => this.showEarlier());
    this.earlier.hidden = true;
    this.wrap = button(gettext("Wrap"), () => this.toggleWrap());
    this.wrap.setAttribute("aria-pressed", "true");
    const download = element("a", "btn btn-sm", { href: `${this.restUrl}/download${this.attemptQuery("?")}`, download: "" });
    download.textContent = gettext("Download");
    const full = button(gettext("Full screen"), () => (document.fullscreenElement ? document.exitFullscreen() : this.requestFullscreen()));
    const title = element("strong", "log-title");
    title.textContent = this.dataset.title ? `${this.name} ${this.dataset.title}` : this.name;
    bar.append(title, this.status, this.find, this.earlier, this.toEnd, this.wrap, download, full);
    if (this.hasAttribute("data-closable")) bar.append(button(gettext("Close"), () => this.remove()));
    this.screen = element("div", "log-screen", { tabindex: "0", role: "region", "aria-label": interpolate(gettext("Log of %(name)s"), { name: this.name }) });
    this.hits = element("div", "log-hits", {});
    this.hits.hidden = true;
    this.append(bar, this.hits, this.screen);

    this.terminal = new Terminal({
      allowProposedApi: true, convertEol: true, disableStdin: true, cursorBlink: false, cursorInactiveStyle: "none",
      scrollback: SCROLLBACK_LINES, fontSize: 12, theme: this.theme(), minimumContrastRatio: 4.5,
      fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Noto Sans Mono CJK SC', monospace",
      // A click on a link does not open it. Also without effect by default: reports about the window (windowOptions).
      linkHandler: { activate: () => {} },
    });
    ignoreSequences(this.terminal.parser);
    this.fitter = new FitAddon();
    this.searcher = new SearchAddon();
    this.terminal.loadAddon(this.fitter);
    this.terminal.loadAddon(this.searcher);
    this.terminal.loadAddon(new Unicode11Addon());
    this.terminal.unicode.activeVersion = "11";
    this.terminal.open(this.screen);
    this.terminal.onScroll(() => this.showScrollPosition());
    this.screen.addEventListener("wheel", () => setTimeout(() => this.showScrollPosition(), 50), { passive: true });
    this.screen.addEventListener("keydown", (event) => this.scrollByKey(event));
    this.resizeObserver = new ResizeObserver(() => this.fit());
    this.resizeObserver.observe(this.screen);
    this.themeObserver = new MutationObserver(() => { this.terminal.options.theme = this.theme(); });
    this.themeObserver.observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });
    this.find.addEventListener("keydown", (event) => { if (event.key === "Enter") this.search(event.shiftKey); });
  }

  theme() { return THEMES[document.documentElement.dataset.bsTheme] ?? THEMES.light; }

  fit() {
    const size = this.fitter.proposeDimensions();
    if (!size || !size.rows) return;
    this.terminal.resize(this.wrapped ? size.cols : Math.max(WIDE_COLUMNS, size.cols), size.rows);
  }

  toggleWrap() {
    this.wrapped = !this.wrapped;
    this.wrap.setAttribute("aria-pressed", String(this.wrapped));
    this.screen.classList.toggle("log-wide", !this.wrapped);
    this.fit();
  }

  scrollByKey(event) {
    const moves = { PageUp: () => this.terminal.scrollPages(-1), PageDown: () => this.terminal.scrollPages(1), ArrowUp: () => this.terminal.scrollLines(-1), ArrowDown: () => this.terminal.scrollLines(1), Home: () => this.terminal.scrollToTop(), End: () => this.jumpToEnd() };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
    this.showScrollPosition();
  }

  get atEnd() {
    const buffer = this.terminal.buffer.active;
    return buffer.viewportY >= buffer.baseY;
  }

  showScrollPosition() {
    this.toEnd.hidden = this.atEnd;
    this.earlier.hidden = this.start <= 0 || this.terminal.buffer.active.viewportY > 0;
  }

  jumpToEnd() { this.terminal.scrollToBottom(); this.showScrollPosition(); }

  setStatus(text) { this.status.textContent = text; }

  note(text) {
    // Inverse video distinguishes the note from the lines of the log.
    this.terminal.write(`\r\n\x1b[7m ${text} \x1b[0m\r\n`);
  }

  // --- search -------------------------------------------------------------------------------------

  async search(backwards) {
    const text = this.find.value;
    this.hits.hidden = true;
    if (!text) return;
    const found = backwards ? this.searcher.findPrevious(text) : this.searcher.findNext(text);
    if (found) { this.showScrollPosition(); return; }
    // The terminal does not contain the text: search the whole log on the cluster.
    this.setStatus(gettext("Searching the whole log …"));
    const query = new URLSearchParams({ grep: text, ignore_case: "true", matches: "100" });
    if (this.dataset.attempt) query.set("attempt", this.dataset.attempt);
    const response = await fetch(`${this.restUrl}?${query}`, { headers: { Accept: "application/json" } });
    if (!response.ok) { this.setStatus(gettext("The search failed.")); return; }
    this.showHits((await response.json()).matches);
  }

  showHits(matches) {
    this.setStatus(matches.length ? "" : gettext("Not found."));
    this.hits.replaceChildren(...matches.map((match) => button(interpolate(gettext("line %(line)s"), { line: match.line }), () => this.restart(Math.max(0, match.offset - CONTEXT_BYTES)))));
    this.hits.hidden = matches.length === 0;
  }

  // --- bytes -------------------------------------------------------------------------------------------

  attemptQuery(sign) { return this.dataset.attempt ? `${sign}attempt=${this.dataset.attempt}` : ""; }

  showEarlier() { this.restart(Math.max(0, this.start - EARLIER_BYTES)); }

  /** Clear the terminal and show the log from another offset. */
  restart(offset) {
    this.socket?.close();
    clearTimeout(this.timer);
    this.finished = false;
    this.offset = offset;
    this.unrenderedBytes = 0;
    this.terminal.reset();
    this.hits.hidden = true;
    this.open();
  }

  open() {
    const { job, role, index } = this.dataset;
    const socket = openWebSocket(`/ws/jobs/${job}/logs/${encodeURIComponent(role)}/${index}?offset=${this.offset}${this.attemptQuery("&")}`);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    socket.addEventListener("message", (message) => {
      if (socket !== this.socket) return;
      this.backoff.reset();
      if (typeof message.data === "string") this.handleFrame(JSON.parse(message.data));
      else this.draw(new Uint8Array(message.data));
    });
    let accepted = false;
    socket.addEventListener("open", () => { accepted = true; });
    socket.addEventListener("close", (event) => { if (socket === this.socket) this.handleClose(event.code, accepted); });
  }

  handleFrame(frame) {
    if (frame.type === "log") {
      if (this.offset < 0 || this.terminal.buffer.active.length <= 1) this.start = frame.offset;
      this.offset = frame.offset;
      this.dataset.attempt ||= frame.attempt ?? "";
      this.setStatus(gettext("live"));
      this.showScrollPosition();
    } else if (frame.type === "waiting") this.setStatus(frame.reason);
    else if (frame.type === "truncated") {
      this.offset = 0;
      this.note(gettext("The log was truncated and starts again."));
    } else if (frame.type === "gap") {
      this.offset = frame.to;
      this.note(interpolate(gettext("%(bytes)s bytes skipped: the log grows faster than the page can show it. Download it for the full text."), { bytes: frame.to - frame.from }));
    } else if (frame.type === "end") this.handleEnd(frame);
    else if (frame.type === "error") { this.finished = true; this.setStatus(frame.message); }
  }

  handleEnd(frame) {
    this.finished = true;
    const code = frame.exit_code === null || frame.exit_code === undefined ? "" : ` · ${interpolate(gettext("exit code %(code)s"), { code: frame.exit_code })}`;
    this.setStatus(`${gettext("ended")}${code}`);
  }

  draw(bytes) {
    this.offset += bytes.length;
    this.unrenderedBytes += bytes.length;
    if (this.status.textContent !== gettext("live")) this.setStatus(gettext("live"));
    this.terminal.write(bytes, () => {
      this.unrenderedBytes -= bytes.length;
      this.showScrollPosition();
    });
    if (this.unrenderedBytes > MAX_UNRENDERED_BYTES) this.skipToEnd();
  }

  /** Skip to the end of a log that grows faster than the terminal renders it; otherwise unrendered bytes fill the memory. */
  skipToEnd() {
    this.socket.close();
    this.terminal.write("", () => {
      this.note(gettext("A part was skipped: the log grows faster than the page can show it. Download it for the full text."));
      this.offset = -FIRST_BYTES;
      this.unrenderedBytes = 0;
      this.open();
    });
    this.socket = null;
  }

  handleClose(code, accepted) {
    if (this.finished || !this.isConnected) return;
    if (code === 4401) { window.location.reload(); return; }
    if (code === 4404) { this.setStatus(gettext("No such log.")); return; }
    this.setStatus(gettext("connection lost, reconnecting …"));
    this.timer = setTimeout(() => this.open(), this.backoff.nextDelayMs());
    if (!accepted) this.explainRefusal(this.socket);
  }

  /** The server refused the handshake or is unreachable: say which. */
  async explainRefusal(refused) {
    const problem = await findSocketProblem();
    if (this.socket !== refused || !this.isConnected) return;
    if (problem === "signed-out") window.location.reload();
    else if (problem === "refused") this.setStatus(gettext("Too many logs and pages are open. Close some; this one tries again automatically."));
  }
}

/** Make the terminal ignore sequences that affect more than the text of the log. */
function ignoreSequences(parser) {
  for (const code of IGNORED_OSC) parser.registerOscHandler(code, () => true);
  parser.registerDcsHandler({ intermediates: "$", final: "q" }, () => true); // asks for the terminal's settings
  for (const final of ["h", "l"]) {
    parser.registerCsiHandler({ prefix: "?", final }, (params) => params.flat().some((mode) => !ALLOWED_PRIVATE_MODES.has(mode)));
  }
}

function element(tag, className, attributes = {}) {
  const created = document.createElement(tag);
  created.className = className;
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  return created;
}

function button(text, action) {
  const created = element("button", "btn btn-sm", { type: "button" });
  created.textContent = text;
  created.addEventListener("click", action);
  return created;
}

customElements.define("log-view", LogView);
