// The frame around all pages: signing in, navigation, the live stream, and what needs a person.

import { ApiError, get, post, send, useToken, whenSignedOut } from "./api.js";
import { h, render } from "./dom.js";
import { compact } from "./format.js";
import { Live } from "./live.js";
import { empty, explain, link, notify } from "./parts.js";
import { ROUTES, SECTIONS } from "./routes.js";
import { loadWords } from "./words.js";

const HOME = "/dashboard";

const app = {
  me: null,
  page: null, // {title, view()} of the path
  path: "",
  busy: false,
  status: null, // of the engine, for the badges
  menu: false,
};

const live = new Live(() => update());
let scheduled = false;

/** Draw again, soon, once for all that changed. */
function update() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw();
  });
}

// -- signing in ----------------------------------------------------------------------------------

async function start() {
  try {
    await Promise.all([loadWords(), signedIn(await get("/v1/me", {}, { signingIn: true }))]);
  } catch (error) {
    if (error.status === 401) return askForKey();
    return render(document.getElementById("app"), empty(explain(error)), retryButton());
  }
  await open(location.href, { first: true });
}

function signedIn(me) {
  app.me = me;
  useToken(me.csrf_token);
}

function retryButton() {
  return h("p", { class: "boot" }, h("button", { onclick: start }, "Try again"));
}

function askForKey(problem = "") {
  live.follow(null);
  app.ended?.();
  app.page = app.me = app.context = null;
  document.title = "Sign in: Penstock";
  const submit = async (event) => {
    event.preventDefault();
    const key = new FormData(event.currentTarget).get("key").trim();
    try {
      signedIn(await post("/v1/session", { key }, { signingIn: true }));
    } catch (error) {
      return askForKey(explain(error));
    }
    await start();
  };
  render(
    document.getElementById("app"),
    h(
      "main",
      { class: "sign-in", key: "sign-in" },
      h("h1", null, "Sign in to Penstock"),
      h(
        "form",
        { onsubmit: submit },
        h("label", { class: "field" }, h("span", null, "API key"),
          h("input", { type: "password", name: "key", required: true, autocomplete: "current-password", ref: (input) => input.focus() })),
        problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
        h("button", { class: "primary" }, "Sign in"),
      ),
      h("p", { class: "soft" }, "Or run ", h("code", null, "penstock dashboard"), " where the engine runs: it prints a link that signs you in."),
    ),
  );
}

async function signOut() {
  await send("DELETE", "/v1/session");
  askForKey();
}

// -- navigation ----------------------------------------------------------------------------------

const may = (operation) => !operation || app.me.allowed.includes(operation);

/** Open a path of the dashboard; the page before stays until the new one has its data. */
async function open(href, { first = false, replace = false, back = false } = {}) {
  const target = new URL(href, location.href);
  const path = decodeURIComponent(target.pathname.slice(HOME.length).replace(/^\/|\/$/g, ""));
  if (!first && !back) history[replace ? "replaceState" : "pushState"](null, "", target);
  const samePath = path === app.path && !first;
  Object.assign(app, { path, busy: true, menu: false });
  update();
  const context = (app.context = contextOf(target));
  let page;
  try {
    const found = match(path);
    page = found ? await found.page(context, ...found.values) : nothing();
  } catch (error) {
    if (error.status === 401) return;
    page = failed(error);
  }
  if (app.context !== context) return context.end(); // another one was opened meanwhile
  app.ended?.();
  Object.assign(app, { page, ended: context.end, busy: false });
  document.title = `${page.title}: Penstock`;
  draw();
  context.ready = true;
  subscribe(context);
  if (samePath || back) return;
  window.scrollTo(0, 0);
  if (!first) document.querySelector("main h1")?.focus({ preventScroll: true });
}

/** What a page is given. */
function contextOf(target) {
  const timers = [];
  const context = {
    me: app.me,
    may,
    query: target.searchParams,
    update,
    go: open,
    ready: false,
    followed: [{}, {}],
    /** Follow events on this page: {kind: fn(data)}, with more parameters of the stream. */
    follow(on, params = {}) {
      context.followed = [on, params];
      if (context.ready && app.context === context) subscribe(context);
    },
    /** Reads everything of the page again, after the stream was away. */
    resync() {},
    /** While the stream is live. */
    every(seconds, act) {
      timers.push(setInterval(() => live.status === "live" && behind(act), seconds * 1000));
    },
    /** A function that does this soon, once for all calls until then. */
    soon(act, milliseconds = 400) {
      let timer = null;
      return () => {
        timer ??= setTimeout(async () => {
          await behind(act);
          timer = null;
        }, milliseconds);
      };
    },
    end() {
      timers.forEach(clearInterval);
      context.ended = true;
    },
  };
  /** What is done without being asked for: that the engine is away is shown elsewhere. */
  async function behind(act) {
    if (context.ended) return;
    try {
      await act();
    } catch (error) {
      if (error.status !== 0 && error.status !== 401) notify(explain(error), "bad");
    }
  }
  context.behind = behind;
  return context;
}

function subscribe(context) {
  const [on, params] = context.followed;
  const kinds = Object.keys(on).filter((kind) => kind !== "worker_gone" && (may("list_workers") || !OPERATOR_KINDS.includes(kind)));
  live.follow({
    params: { ...params, kind: [...new Set(["counts", ...kinds])] },
    on: {
      ...on,
      counts(data) {
        on.counts?.(data);
        lookAtStatus();
      },
    },
    resync() {
      lookAtStatus();
      context.behind(context.resync);
    },
  });
}

const OPERATOR_KINDS = ["worker", "pool", "nodes"];

function match(path) {
  for (const [pattern, page] of ROUTES) {
    const found = pattern.exec(path);
    if (found) return { page, values: found.slice(1) };
  }
  return null;
}

function nothing() {
  return { title: "Not found", view: () => [h("h1", { tabindex: -1 }, "Not found"), empty("There is no such page. ", link(`${HOME}/`, null, "Go to the overview."))] };
}

function failed(error) {
  const title = error instanceof ApiError && error.status === 404 ? "Not found" : "That did not work";
  return { title, view: () => [h("h1", { tabindex: -1 }, title), h("p", { class: "problem", role: "alert" }, explain(error)), h("button", { onclick: () => open(location.href, { replace: true }) }, "Try again")] };
}

document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  if (anchor.hasAttribute("download") || anchor.target || anchor.origin !== location.origin) return;
  if (!anchor.pathname.startsWith(`${HOME}/`) || anchor.pathname.startsWith(`${HOME}/static/`)) return;
  event.preventDefault();
  open(anchor.href);
});
window.addEventListener("popstate", () => app.me && open(location.href, { back: true }));

// Where nothing can be hovered over, a tap shows the explanation.
document.addEventListener("click", (event) => {
  if (!matchMedia("(hover: none)").matches || event.target.closest("a, button, input, select, textarea, summary, label")) return;
  const text = event.target.closest("[title]")?.title || event.target.closest("g, rect")?.querySelector("title")?.textContent;
  if (text) notify(text, "about");
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(?:input|textarea|select)$/i.test(event.target.tagName)) return;
  const box = document.querySelector("input[type=search]");
  if (!box) return;
  event.preventDefault();
  box.focus();
});

// -- what needs a person -------------------------------------------------------------------------

let lookedAt = 0;
let looking = null;

/** Ask for the engine's status, at most every two seconds. */
function lookAtStatus() {
  if (looking) return;
  looking = setTimeout(async () => {
    lookedAt = Date.now();
    try {
      app.status = await get("/v1/status");
      update();
    } catch {
      // The stream's state says that the engine is away.
    } finally {
      looking = null;
    }
  }, Math.max(0, lookedAt + 2000 - Date.now()));
}

// -- drawing -------------------------------------------------------------------------------------

const LIVE = {
  live: ["Live", "What you see changes as it happens."],
  connecting: ["Connecting …", "The event stream is being opened."],
  broken: ["Reconnecting …", "The engine can't be reached. The page goes on by itself when it is back."],
  paused: ["Paused", "Nothing changes by itself until you resume."],
  hidden: ["Live", "The stream is closed while the tab is hidden."],
};

function draw() {
  if (!app.me || !app.page) return;
  render(
    document.getElementById("app"),
    h("a", { class: "skip", href: "#main", key: "skip" }, "Skip to content"),
    h("div", { class: `frame ${app.menu ? "menu-open" : ""}`, key: "frame" }, sidebar(), main()),
    h("div", { id: "notices", role: "status", key: "notices", own: true }),
  );
}

function sidebar() {
  return h(
    "header",
    { class: "sidebar" },
    h(
      "div",
      { class: "brand" },
      link(`${HOME}/`, { class: "name" }, h("img", { src: `${HOME}/static/icon.svg`, alt: "", width: 24, height: 24 }), "Penstock"),
      h("button", { class: "menu", type: "button", "aria-expanded": String(app.menu), "aria-controls": "nav", onclick: () => { app.menu = !app.menu; update(); } }, "Menu"),
    ),
    h(
      "nav",
      { id: "nav", "aria-label": "Pages" },
      SECTIONS.map(([title, entries]) => {
        const shown = entries.filter(({ needs }) => may(needs));
        return shown.length
          ? h("div", { key: title }, title ? h("h2", null, title) : null, h("ul", null, shown.map(entry)))
          : null;
      }),
    ),
    h(
      "div",
      { class: "who" },
      liveButton(),
      h("p", null, h("b", null, app.me.name), h("span", { class: "soft" }, app.me.tenant ? ` of tenant ${app.me.tenant}` : ", all tenants")),
      h("p", null, link("/docs", { target: "_blank" }, "HTTP API"), " · ", h("button", { class: "quiet", type: "button", onclick: signOut }, "Sign out")),
    ),
  );
}

function entry({ path, title, badge }) {
  const here = app.path === path || (path && app.path.startsWith(`${path}/`));
  const number = app.status && badge ? badge(app.status) : 0;
  return h(
    "li",
    { key: path },
    link(`${HOME}/${path}`, { "aria-current": here ? "page" : null }, title, number ? h("span", { class: "count", title: `${number} need a person` }, compact(number)) : null),
  );
}

function liveButton() {
  const [text, about] = LIVE[live.status];
  const paused = live.paused;
  return h(
    "button",
    { class: `live ${live.status}`, type: "button", title: `${about} Click to ${paused ? "resume" : "pause"}.`, onclick: () => live.pause(!paused) },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("span", { id: "live" }, text),
    h("span", { class: "soft" }, paused ? "resume" : "pause"),
  );
}

function main() {
  return h("main", { id: "main", "aria-busy": String(app.busy), tabindex: -1 },
    live.status === "broken" ? h("p", { class: "problem", role: "status" }, LIVE.broken[1]) : null,
    h("div", { key: `page ${app.page.key ?? app.page.title}` }, app.page.view()));
}

whenSignedOut(() => askForKey("Your session has ended."));
start();
