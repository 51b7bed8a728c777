// API keys: who may do what.

import { del, get, part, post } from "../api.js";
import { h } from "../dom.js";
import { ask, badge, copyable, explain, moment, notify, section, since, table } from "../parts.js";
import { term } from "../words.js";

const ROLES = {
  submit: "submit jobs; cancel and retry single ones",
  operate: "schedules, limits and pools; cancel and retry in bulk",
  approve: "approve and reject jobs that are awaiting approval",
  admin: "everything, and keys, rules and the audit log besides",
};

export default async function keysPage(ctx) {
  let keys;
  let made = null;
  let problem = "";

  async function read() {
    ({ keys } = await get("/v1/keys"));
    ctx.update();
  }

  await read();
  ctx.resync = read;

  const state = (key) => (key.revoked_at ? "REVOKED" : key.expires_at && key.expires_at * 1000 < Date.now() ? "EXPIRED" : "ACTIVE");

  async function create(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const given = new FormData(form);
    try {
      const days = Number(given.get("days"));
      made = await post("/v1/keys", { name: given.get("name"), roles: given.getAll("role"), tenant: given.get("tenant") || null, expires_in: days ? days * 86_400 : null });
      problem = "";
      form.reset();
      await read();
    } catch (error) {
      problem = explain(error);
      ctx.update();
    }
  }

  return {
    title: "Keys",
    view: () => [
      h("h1", { tabindex: -1 }, "Keys"),
      made ? section("New key", { key: "made" }, h("p", null, `The token of ${made.key.name}. It is shown once; only its hash is stored.`), copyable(made.token)) : null,
      section("Keys", { key: "keys" },
        table(
          [
            ["Name", (key) => h("b", null, key.name), { about: term("principal") }],
            ["Id", (key) => h("code", null, key.key_id)],
            ["State", (key) => badge(state(key), "key")],
            ["Roles", (key) => key.roles.map((role) => h("span", { class: "tag", key: role, title: ROLES[role] }, role))],
            ["Tenant", (key) => key.tenant ?? "all", { about: term("tenant") }],
            ["Created", (key) => since(key.created_at)],
            ["Expires", (key) => (key.expires_at ? moment(key.expires_at) : "never")],
            ["", (key) => (state(key) === "ACTIVE" ? h("button", { type: "button", class: "danger", "aria-label": `Revoke the key ${key.name}`, onclick: () => revoke(key) }, "Revoke …") : "")],
          ],
          keys, { key: (key) => key.key_id, label: "Keys", none: "No key yet: only the owner may come in." })),
      section("Create a key", { key: "form" },
        h("form", { onsubmit: create },
          h("div", { class: "columns" },
            h("label", { class: "field" }, h("span", null, "Name of its holder"), h("input", { name: "name", required: true, autocomplete: "off" })),
            h("label", { class: "field" }, h("span", null, "Tenant", h("small", null, " (empty: all)")), h("input", { name: "tenant", autocomplete: "off" })),
            h("label", { class: "field" }, h("span", null, "Valid for days", h("small", null, " (empty: always)")), h("input", { name: "days", type: "number", min: 1 }))),
          h("fieldset", null, h("legend", null, "Roles"), Object.entries(ROLES).map(([role, about]) => h("label", { class: "check", key: role }, h("input", { type: "checkbox", name: "role", value: role }), h("b", null, role), h("small", null, ` ${about}`)))),
          problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
          h("button", { class: "primary" }, "Create"))),
    ],
  };

  function revoke(key) {
    ask({
      title: `Revoke the key ${key.name}?`,
      verb: "Revoke",
      tone: "danger",
      body: h("p", null, "It is refused from now on, and its browser sessions end."),
      act: async () => {
        await del(`/v1/keys/${part(key.key_id)}`);
        notify("Revoked.");
        await read();
      },
    });
  }
}
