// The audit log: who did what, and what was refused.

import { get } from "../api.js";
import { h } from "../dom.js";
import { badge, link, moment, section, table } from "../parts.js";
import { term } from "../words.js";

const FILTERS = { principal: "Who", action: "Action, as key.*", subject: "What it was done to" };

export default async function audit(ctx) {
  const given = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, ctx.query.get(name)]));
  const cursor = ctx.query.get("cursor");
  const { entries, next } = await get("/v1/audit", { ...given, cursor, limit: 100 });
  const href = (more) => `/dashboard/audit?${new URLSearchParams(Object.entries({ ...given, ...more }).filter(([, value]) => value))}`;

  return {
    title: "Audit",
    key: "audit",
    view: () => [
      h("h1", { tabindex: -1 }, "Audit log"),
      h("form", { class: "search", role: "search", onsubmit: (event) => { event.preventDefault(); ctx.go(href({ ...Object.fromEntries(new FormData(event.currentTarget)), cursor: "" })); } },
        Object.entries(FILTERS).map(([name, text]) => h("input", { key: name, type: "search", name, value: given[name] ?? "", "aria-label": text, placeholder: text, autocomplete: "off" })),
        h("button", null, "Search")),
      section("Entries", { about: term("audit log") },
        table(
          [
            ["Time", (entry) => moment(entry.at)],
            ["Who", (entry) => h("b", null, entry.principal)],
            ["Action", (entry) => link(href({ action: entry.action, cursor: "" }), null, entry.action)],
            ["Subject", (entry) => (entry.subject ? h("code", null, entry.subject) : "")],
            ["Tenant", (entry) => entry.tenant ?? ""],
            ["Outcome", (entry) => badge(entry.outcome ?? "done", "audit")],
            ["Detail", (entry) => (entry.detail ? h("span", { class: "message" }, entry.detail) : "")],
          ],
          entries, { key: (entry) => entry.n, label: "Audit log", none: "No entry matches." })),
      h("nav", { class: "pages", "aria-label": "Pages of the log" }, cursor ? link(href({ cursor: "" }), null, "« Newest") : null, next ? link(href({ cursor: next }), null, "Older »") : null),
    ],
  };
}
