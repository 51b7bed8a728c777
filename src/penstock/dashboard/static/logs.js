// A job's log: many lines, search, and following the end until a person scrolls up.

import { clock, count, plural } from "./format.js";
import { h } from "./dom.js";

const CHUNK = 200; // lines that the browser lays out together, or not at all while out of sight
const MOST = 50_000;
const CODES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;

export class LogView {
  constructor(onChange) {
    this.onChange = onChange;
    this.seen = 0; // the number of the last line
    this.lines = 0;
    this.query = "";
    this.hits = 0;
    this.follows = true;
    this.box = null;
    this.chunk = null;
  }

  view() {
    return h(
      "div",
      { class: "log-view" },
      h(
        "div",
        { class: "line" },
        h("input", { type: "search", "aria-label": "Search in the log", placeholder: "Search in the log", oninput: (event) => this.search(event.target.value) }),
        this.query ? h("span", { class: "soft", role: "status" }, `${count(this.hits)} of ${count(this.lines)} lines`) : h("span", { class: "soft" }, plural(this.lines, "line")),
        h("button", { type: "button", "aria-pressed": String(this.follows), title: "Keep the end in sight while lines come", onclick: () => this.follow(!this.follows) }, this.follows ? "Following" : "Follow"),
      ),
      h("div", { class: "log", role: "log", "aria-label": "Log lines", "aria-live": "off", tabindex: 0, own: true, ref: (box) => this.attach(box) }),
    );
  }

  attach(box) {
    this.box = box;
    // Only a person's scrolling decides whether the end is followed, not how far it is. What they
    // begin is believed at once: a line that comes meanwhile would pull them down again.
    const release = () => this.follows && box.scrollTop > 0 && this.follow(false);
    box.addEventListener("wheel", (event) => event.deltaY < 0 && release(), { passive: true });
    box.addEventListener("touchmove", release, { passive: true });
    box.addEventListener("keydown", (event) => ["ArrowUp", "PageUp", "Home"].includes(event.key) && release());
    let top = 0;
    box.addEventListener("scroll", () => {
      const moved = box.scrollTop - top;
      top = box.scrollTop;
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 4;
      if (moved < -4 && !atEnd) release();
      else if (moved > 0 && atEnd && !this.follows) this.follow(true);
    });
    for (const line of this.waiting ?? []) this.append(line);
    this.waiting = null;
  }

  follow(follows) {
    this.follows = follows;
    if (follows) this.toEnd();
    this.onChange();
  }

  toEnd() {
    if (this.box) this.box.scrollTop = this.box.scrollHeight;
  }

  add(line) {
    if (line.n <= this.seen) return;
    this.seen = line.n;
    this.lines += 1;
    if (this.box) this.append(line);
    else (this.waiting ??= []).push(line);
  }

  append(line) {
    if (!this.chunk || this.chunk.childElementCount >= CHUNK) {
      this.chunk = document.createElement("div");
      this.chunk.className = "chunk";
      this.box.append(this.chunk);
      if (this.box.childElementCount * CHUNK > MOST) this.box.firstElementChild.remove();
    }
    const row = document.createElement("div");
    row.className = `log-line level-${/^[a-z]+$/.test(line.level) ? line.level : "info"}`;
    const time = document.createElement("time");
    time.textContent = clock(line.at);
    const text = document.createElement("span");
    text.textContent = line.text.replace(CODES, "").replace(/^.*\r(?!$)/, "");
    row.append(time, text);
    this.chunk.append(row);
    this.mark(row);
    if (this.follows) (this.scrolling ??= requestAnimationFrame(() => { this.scrolling = null; this.toEnd(); }));
  }

  search(query) {
    this.query = query.trim().toLowerCase();
    this.hits = 0;
    for (const row of this.box.querySelectorAll(".log-line")) this.mark(row);
    this.onChange();
  }

  mark(row) {
    const hit = !this.query || row.lastChild.textContent.toLowerCase().includes(this.query);
    row.hidden = !hit;
    if (hit && this.query) this.hits += 1;
  }
}
