// The safety rules in force, and what other rules would have decided.

import { get, post } from "../api.js";
import { h } from "../dom.js";
import { count, plural } from "../format.js";
import { action, empty, explain, facts, jobLink, moment, notify, section, table } from "../parts.js";
import { term } from "../words.js";

export default async function policyPage(ctx) {
  let policy = await get("/v1/policy");
  let simulation = null;
  let problem = "";
  let busy = false;

  async function simulate(event) {
    event.preventDefault();
    const text = event.currentTarget.elements.rules.value;
    busy = true;
    problem = "";
    ctx.update();
    try {
      simulation = await post("/v1/policy/simulate", { text });
    } catch (error) {
      simulation = null;
      problem = explain(error);
    }
    busy = false;
    ctx.update();
  }

  return {
    title: "Policy",
    view: () => [
      h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Policy"),
        ctx.may("reload_policy") ? action("Reload the rule file", async () => { policy = await post("/v1/policy/reload"); notify("Reloaded."); ctx.update(); }) : null),
      policy.problem ? h("p", { class: "problem", role: "alert" }, `The current file was not accepted, and the last valid rules stay in force: ${policy.problem}`) : null,
      section("Rules in force", { key: "rules", about: term("rule") },
        facts([["Snapshot", h("code", null, policy.snapshot), term("snapshot")], ["File", policy.source || "none: built-in rules"], ["Loaded", moment(policy.loaded_at), "Since when these rules are in force."], ["If no rule matches", policy.default.replaceAll("_", " ")]]),
        table(
          [
            ["Rule", (rule) => h("b", null, rule.id)],
            ["Decision", (rule) => h("span", { class: `decision ${rule.decision}` }, rule.decision.replaceAll("_", " "))],
            ["If", (rule) => (Object.keys(rule.conditions).length ? Object.entries(rule.conditions).map(([field, value]) => h("div", { key: field }, h("span", { class: "soft" }, `${field} `), h("code", null, value))) : "every job")],
            ["Then", (rule) => rule.effect],
            ["Reason", (rule) => rule.reason],
          ],
          policy.rules, { key: (rule) => rule.id, label: "Rules", none: "No rules: every job is judged by the default." }),
        policy.rules.length ? h("p", { class: "soft" }, "The first rule that matches decides.") : null),
      section("Simulate other rules", { key: "simulate", about: "Judges the newest 10,000 jobs by these rules. Changes nothing." },
        h("form", { onsubmit: simulate },
          h("label", { class: "field" }, h("span", null, "Rules, as in a rule file (TOML)"), h("textarea", { name: "rules", class: "code rules", spellcheck: "false", required: true, placeholder: 'default = "allow"\n\n[[rules]]\nid = "no-mail"\ndecision = "deny"\ntopics = ["job.mail.*"]' })),
          problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
          h("button", { class: "primary", disabled: busy }, busy ? "Judging past jobs …" : "Simulate over the past")),
        simulation ? outcome() : null),
    ],
  };

  function outcome() {
    const { looked_at, changed, decisions, differences } = simulation;
    return h("div", { role: "status" },
      h("p", null, h("b", null, `${plural(changed, "job")} of ${count(looked_at)} would be judged otherwise.`), ` Decisions: ${Object.entries(decisions).map(([decision, n]) => `${decision.replaceAll("_", " ")} ${count(n)}`).join(", ")}.`),
      table([["Job", (one) => jobLink(one.job_id)], ["Topic", (one) => one.topic], ["Tenant", (one) => one.tenant], ["Was", (one) => one.was], ["Would be", (one) => h("b", null, one.would_be)]], differences.slice(0, 200), { key: (one) => one.job_id, label: "Differences", none: "No past job would be judged otherwise." }),
      differences.length > 200 ? empty("The first 200 are shown.") : null);
  }
}
