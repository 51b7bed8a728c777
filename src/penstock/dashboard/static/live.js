// The one event stream of this tab. It closes while the tab is hidden or paused, comes back by
// itself after a broken connection, and then goes on where it was.
//
// Events tell a page that something changed; the page then reads it again. So an event that was
// missed costs nothing: after a gap, a pause or a reconnect the page is told to read everything.

import { failure, url } from "./api.js";

const SILENCE = 45_000; // the engine gives a sign of life every 15 s
const LONGEST_WAIT = 15_000;

export class Live {
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.status = "connecting";
    this.paused = false;
    this.wanted = null;
    this.place = null;
    this.controller = null;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    window.addEventListener("online", () => this.restart());
  }

  /** Follow these: {params, on: {kind: fn(data)}, resync: fn()}. Replaces what was followed. */
  follow(wanted) {
    this.wanted = wanted;
    // Without the places in logs, which belong to the stream before.
    this.place = this.place?.split("-")[0] ?? null;
    this.restart({ fresh: true });
  }

  pause(paused) {
    this.paused = paused;
    this.restart();
  }

  restart({ fresh = false } = {}) {
    this.controller?.abort();
    clearTimeout(this.timer);
    this.failures = 0;
    if (this.paused) this.tell("paused");
    else if (document.hidden) this.tell("hidden");
    else if (this.wanted) this.connect(!fresh);
  }

  tell(status) {
    if (status === this.status) return;
    this.status = status;
    this.onStatus(status);
  }

  async connect(again) {
    const { params, resync } = this.wanted;
    const controller = (this.controller = new AbortController());
    if (this.failures) this.tell("broken");
    let silence;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort("silent"), SILENCE);
    };
    try {
      const path = url("/v1/stream", { ...params, after: this.place, replay: this.place ? 2000 : null });
      const response = await fetch(path, { signal: controller.signal, cache: "no-store" });
      if (!response.ok) throw await failure(response);
      alive();
      this.failures = 0;
      this.tell("live");
      if (again) resync?.();
      await this.read(response, alive);
      throw new Error("the stream ended");
    } catch (error) {
      if (controller !== this.controller) return; // replaced by another one
      if (controller.signal.aborted && controller.signal.reason !== "silent") return;
      if (error.status === 401) return;
      if (error.status === 404 || error.status === 422) this.place = null;
      this.failures += 1;
      this.tell("broken");
      const wait = Math.min(LONGEST_WAIT, 500 * 2 ** Math.min(this.failures - 1, 6));
      this.timer = setTimeout(() => this.connect(true), wait);
    } finally {
      clearTimeout(silence);
    }
  }

  async read(response, alive) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) this.frame(frame);
    }
  }

  frame(text) {
    let kind = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("id: ")) this.place = line.slice(4);
      else if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (kind === "gap") this.wanted.resync?.();
    else if (kind && data) this.wanted.on[kind]?.(JSON.parse(data));
  }
}
