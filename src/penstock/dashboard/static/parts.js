// Pieces that several pages use: badges, tables, dialogs, notices, payloads.

import { ApiError } from "./api.js";
import { ago, bytes, clock, count, full, plural, shortId, span, within } from "./format.js";
import { h, render } from "./dom.js";
import { about as aboutHeading, reason, stateOf } from "./words.js";

// -- states --------------------------------------------------------------------------------------

// One shape for each state, so that colour is never the only sign.
const SHAPES = {
  PENDING: { d: "M8 2.2a5.8 5.8 0 1 1 0 11.6A5.8 5.8 0 0 1 8 2.2", dots: true },
  SCHEDULED: { d: "M8 2.2a5.8 5.8 0 1 1 0 11.6A5.8 5.8 0 0 1 8 2.2M8 4.8V8l2.4 1.6" },
  DISPATCHED: { d: "M2.5 8h10M8.8 4.2 12.6 8l-3.8 3.8" },
  RUNNING: { d: "M4.5 2.8v10.4L13 8z", fill: true },
  SUCCEEDED: { d: "m2.8 8.6 3.4 3.4 7-8" },
  FAILED: { d: "m3.6 3.6 8.8 8.8m0-8.8-8.8 8.8" },
  TIMEOUT: { d: "M4 2.2h8M4 13.8h8M4.8 2.2c0 3.4 2.2 4 3.2 5.8 1-1.8 3.2-2.4 3.2-5.8M4.8 13.8c0-3.4 2.2-4 3.2-5.8 1 1.8 3.2 2.4 3.2 5.8" },
  CANCELLED: { d: "M8 2.2a5.8 5.8 0 1 1 0 11.6A5.8 5.8 0 0 1 8 2.2M4 12 12 4" },
  DENIED: { d: "M2.5 8h11", wide: true },
};

export function icon(state) {
  const shape = SHAPES[stateOf(state).like];
  return h(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" },
    h("path", {
      d: shape.d,
      fill: shape.fill ? "currentColor" : "none",
      stroke: "currentColor",
      "stroke-width": shape.wide ? 4 : 2,
      "stroke-linejoin": "round",
      "stroke-linecap": "round",
      "stroke-dasharray": shape.dots ? "0.1 3.54" : null,
    }),
  );
}

export function badge(state, lifecycle = "canonical") {
  const { name, meaning } = stateOf(state, lifecycle);
  return h("span", { class: `badge state-${name}`, title: meaning || null }, icon(state), h("span", null, name));
}

// -- words ---------------------------------------------------------------------------------------

/** A link within the page. */
export function link(href, props, ...children) {
  return h("a", { href, ...props }, ...children);
}

export function jobLink(job_id, { whole = false } = {}) {
  return link(`/dashboard/jobs/${encodeURIComponent(job_id)}`, { class: "id", title: job_id }, whole ? job_id : shortId(job_id));
}

export function since(at) {
  return at ? h("time", { title: full(at), datetime: new Date(at * 1000).toISOString() }, ago(at)) : "";
}

export function until(at) {
  return at ? h("time", { title: full(at), datetime: new Date(at * 1000).toISOString() }, within(at)) : "";
}

export function moment(at) {
  return at ? h("time", { title: full(at), datetime: new Date(at * 1000).toISOString() }, clock(at)) : "";
}

/** How long a job ran so far. */
export function runTime(job, now = Date.now() / 1000) {
  if (!job.started_at) return "";
  return span((job.finished_at ?? now) - job.started_at);
}

export function copyable(text) {
  return h(
    "span",
    { class: "copyable" },
    h("code", null, text),
    h(
      "button",
      {
        class: "quiet",
        type: "button",
        "aria-label": `Copy ${text}`,
        title: "Copy",
        onclick: async (event) => {
          const button = event.currentTarget;
          await navigator.clipboard?.writeText(text).catch(() => {});
          button.classList.add("copied");
          setTimeout(() => button.classList.remove("copied"), 1200);
        },
      },
      h("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" },
        h("path", { d: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3", fill: "none", stroke: "currentColor", "stroke-width": 1.5 })),
    ),
  );
}

/** The command that does the same. */
export function command(text) {
  return h("p", { class: "command" }, h("span", { class: "soft" }, "The same on the command line: "), copyable(text));
}

export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${String(text).replaceAll("'", `'\\''`)}'`;
}

// -- boxes ---------------------------------------------------------------------------------------

export function section(title, props, ...children) {
  const { about, aside, ...rest } = props ?? {};
  return h(
    "section",
    { class: "card", ...rest },
    h("header", null, h("h2", { title: about }, title), aside ?? null),
    children,
  );
}

export function empty(...children) {
  return h("p", { class: "empty" }, ...children);
}

/** A table: columns are [title, cell(row), {about, class, head}]. On a phone each row is a card. */
export function table(columns, rows, { key, label, rowClass, none = "Nothing here." } = {}) {
  if (!rows.length) return empty(none);
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { "aria-label": label },
      h("thead", null, h("tr", null, columns.map(([title, , more]) =>
        h("th", { scope: "col", title: more?.about ?? aboutHeading(title), class: more?.class }, more?.head ?? (title || h("span", { class: "hide" }, "Actions")))))),
      h(
        "tbody",
        null,
        rows.map((row, index) =>
          h(
            "tr",
            { key: key ? key(row) : index, class: rowClass?.(row) },
            columns.map(([title, cell, more]) => h("td", { "data-title": title, class: more?.class }, cell(row))),
          ),
        ),
      ),
    ),
  );
}

/** Facts as name and value; empty values are left out. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .map(([name, value, about]) => h("div", { key: name, title: about ?? aboutHeading(name) }, h("dt", null, name), h("dd", null, value))),
  );
}

/** A bar that is so full, with a text beside it. */
export function meter(value, most, text, tone = "") {
  const share = most ? Math.min(1, value / most) : 0;
  return h(
    "span",
    { class: `meter ${tone}` },
    most ? h("svg", { "aria-hidden": "true", viewBox: "0 0 100 8", preserveAspectRatio: "none" },
      h("rect", { class: "rail", width: 100, height: 8 }),
      h("rect", { class: "fill", width: 100 * share, height: 8 })) : null,
    h("span", null, text),
  );
}

/** An error code, explained on hover. */
export function errorCode(code) {
  return code ? h("code", { class: "reason", title: reason(code) }, code) : null;
}

export function tags(labels) {
  return Object.entries(labels ?? {}).map(([name, value]) => h("span", { class: "tag", key: name }, `${name}=${value}`));
}

// -- notices and dialogs -------------------------------------------------------------------------

/** Say something at the edge of the window; screen readers hear it. */
export function notify(text, tone = "good") {
  const box = document.getElementById("notices");
  if (!box) return;
  const note = document.createElement("p");
  note.className = `notice ${tone}`;
  note.textContent = text;
  box.append(note);
  setTimeout(() => note.remove(), tone === "bad" ? 12_000 : 5000);
}

export function explain(error) {
  if (!(error instanceof ApiError)) return error.message;
  const said = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return error.hint ? `${said}. ${error.hint.charAt(0).toUpperCase()}${error.hint.slice(1)}.` : `${said}.`;
}

/** A button that does something with the engine: busy meanwhile, and saying what went wrong. */
export function action(title, act, props = {}) {
  return h(
    "button",
    {
      type: "button",
      ...props,
      onclick: async (event) => {
        const button = event.currentTarget;
        button.disabled = true;
        try {
          await act(event);
        } catch (error) {
          notify(explain(error), "bad");
        } finally {
          button.disabled = false;
        }
      },
    },
    title,
  );
}

/**
 * Ask before something is done. `body` is what to show, `act` what to do; it gets the fields of
 * the form by name. With `type`, a person has to type that first.
 */
export function ask({ title, body, verb, act, tone = "", type = "" }) {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", "dialog-title");
  const close = () => dialog.close();
  const submit = async (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    const fields = Object.fromEntries(new FormData(form));
    if (type && fields.typed?.trim() !== type) return show(`Type ${type} to go on.`);
    show("", true);
    try {
      await act(fields);
      close();
    } catch (error) {
      show(explain(error));
    }
  };
  const show = (problem = "", busy = false) =>
    render(
      dialog,
      h(
        "form",
        { method: "dialog", onsubmit: submit },
        h("h2", { id: "dialog-title" }, title),
        body,
        type
          ? h("label", { class: "field" }, h("span", null, "Type ", h("b", null, type), " to confirm"),
              h("input", { name: "typed", autocomplete: "off", inputmode: "numeric" }))
          : null,
        problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
        h("div", { class: "buttons" },
          h("button", { type: "button", onclick: close }, "Back"),
          h("button", { class: `primary ${tone}`, disabled: busy }, verb)),
      ),
    );
  show();
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function reasonField(label = "Reason (optional, kept with the job)") {
  return h("label", { class: "field" }, h("span", null, label), h("input", { name: "reason", maxlength: 1000, autocomplete: "off" }));
}

// -- payloads ------------------------------------------------------------------------------------

const IMAGES = /^image\/(?:png|jpeg|gif|webp)(?:;|$)/;

class Exact {
  constructor(source) {
    this.source = source;
  }
}

/** JSON without rounding numbers that JavaScript can't hold. */
export function parseJson(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && context?.source && String(value) !== context.source ? new Exact(context.source) : value,
  );
}

/** What a job was given or made: JSON as a tree, text, an image, or a download. */
export function payloadView(payload, { image } = {}) {
  if (!payload) return empty("None.");
  if (payload.foreign) return h("p", null, "Stored elsewhere: ", h("code", null, payload.text));
  const download = h("a", { class: "download", href: payload.path, download: "" }, `Download (${bytes(payload.size)})`);
  if (IMAGES.test(payload.type)) {
    return h("div", null, h("img", { class: "result", src: image ?? payload.path, alt: "The result, an image" }), download);
  }
  if (payload.text === null) return h("p", null, `${payload.type || "Binary data"}, ${bytes(payload.size)}. `, download);
  const cut = payload.cut ? h("p", { class: "soft" }, `The first ${bytes(payload.text.length)} of ${bytes(payload.size)}.`) : null;
  if (!payload.cut && /json/.test(payload.type)) {
    try {
      return h("div", { class: "payload" }, jsonTree(parseJson(payload.text)), download);
    } catch {
      // It says that it is JSON, and is not: shown as text.
    }
  }
  return h("div", { class: "payload" }, h("pre", { tabindex: 0 }, payload.text), cut, download);
}

const SHOWN = 100;

export function jsonTree(value, name, depth = 0) {
  const label = name === undefined ? null : h("span", { class: "json-key" }, `${name}: `);
  if (value === null || typeof value !== "object" || value instanceof Exact) {
    return h("div", { class: "json" }, label, jsonLeaf(value));
  }
  const entries = Object.entries(value);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!entries.length) return h("div", { class: "json" }, label, open + close);
  const what = plural(entries.length, Array.isArray(value) ? "item" : "field");
  return h(
    "details",
    { class: "json", open: entries.length <= (depth < 2 ? 30 : 3) && depth < 5 },
    h("summary", null, label, h("span", { class: "soft" }, `${open} ${what} ${close}`)),
    entries.slice(0, SHOWN).map(([key, one]) => jsonTree(one, key, depth + 1)),
    entries.length > SHOWN ? h("div", { class: "json soft" }, `and ${count(entries.length - SHOWN)} more; download to see them`) : null,
  );
}

function jsonLeaf(value) {
  if (value instanceof Exact) return h("span", { class: "json-number" }, value.source);
  if (typeof value === "string") {
    return value.includes("\n") ? h("pre", { class: "json-text" }, value) : h("span", { class: "json-string" }, JSON.stringify(value));
  }
  return h("span", { class: `json-${value === null ? "null" : typeof value}` }, String(value));
}
