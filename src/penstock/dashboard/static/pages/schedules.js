// Schedules: what is submitted when, and what came of it last.

import { del, get, part, post, put, url } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { action, ask, badge, explain, jobLink, link, moment, notify, section, since, table, until } from "../parts.js";
import { term } from "../words.js";

export default async function schedulesPage(ctx) {
  let schedules;
  let problem = "";

  async function read() {
    ({ schedules } = await get("/v1/schedules"));
    ctx.update();
  }

  await read();
  ctx.resync = read;
  ctx.every(5, read);
  const at = ({ schedule }, verb = "") => url(`/v1/schedules/${part(schedule.name)}${verb && `/${verb}`}`, { tenant: ctx.me.tenant ? null : schedule.tenant });
  const manages = ctx.may("put_schedule");

  return {
    title: "Schedules",
    view: () => [
      h("h1", { tabindex: -1 }, "Schedules"),
      section("Schedules", { about: term("schedule") },
        table(
          [
            ["Name", ({ schedule }) => h("b", null, schedule.name)],
            ["State", (one) => (one.schedule.paused ? badge("PAUSED", "schedule") : badge(one.problem ? "FAILED" : "ACTIVE", "schedule"))],
            ["Cron", ({ schedule }) => h("span", null, h("code", null, schedule.cron), h("span", { class: "soft" }, ` ${schedule.timezone}`))],
            ["Topic", ({ schedule }) => schedule.request.topic],
            ...(ctx.me.tenant ? [] : [["Tenant", ({ schedule }) => schedule.tenant, { about: term("tenant") }]]),
            ["Next", (one) => (one.next_at ? h("span", null, until(one.next_at), later(one)) : "never"), { about: "When it fires next, and after that." }],
            ["Last", (one) => (one.last_at ? h("span", null, since(one.last_at), " ", one.last_job_id ? jobLink(one.last_job_id) : null) : "")],
            ["Fired", (one) => h("a", { href: `/dashboard/jobs?schedule=${encodeURIComponent(one.schedule.name)}` }, count(one.fired)), { class: "number" }],
            ["", (one) => (manages ? h("span", { class: "buttons" },
              action("Fire now", async () => { const job = await post(at(one, "fire")); notify(`Submitted ${job.job_id}.`); await read(); }, { "aria-label": `Fire ${one.schedule.name} now` }),
              action(one.schedule.paused ? "Resume" : "Pause", async () => { await post(at(one, one.schedule.paused ? "resume" : "pause")); await read(); }, { "aria-label": `${one.schedule.paused ? "Resume" : "Pause"} ${one.schedule.name}` }),
              h("button", { type: "button", class: "danger", "aria-label": `Delete ${one.schedule.name}`, onclick: () => remove(one) }, "Delete …")) : "")],
          ],
          schedules, { key: ({ schedule }) => `${schedule.tenant} ${schedule.name}`, label: "Schedules", none: "No schedule yet." }),
        schedules.filter((one) => one.problem).map((one) => h("p", { class: "problem", key: one.schedule.name }, `${one.schedule.name}: ${one.problem}`))),
      manages ? form() : null,
    ],
  };

  /** The times after the next one. */
  function later({ upcoming, schedule }) {
    const [, ...rest] = upcoming;
    return rest.length ? h("details", null, h("summary", null, "then"), h("ul", { class: "soft", "aria-label": `Next times of ${schedule.name}` }, rest.map((time) => h("li", { key: time }, moment(time))))) : null;
  }

  function remove(one) {
    ask({
      title: `Delete the schedule ${one.schedule.name}?`,
      verb: "Delete",
      tone: "danger",
      body: h("p", null, "The jobs that it submitted go on."),
      act: async () => {
        await del(at(one));
        notify("Deleted.");
        await read();
      },
    });
  }

  function form() {
    const field = (name, label, props) => h("label", { class: "field", key: name }, h("span", null, label), h("input", { name, autocomplete: "off", ...props }));
    return section("Create or change one", { key: "form" },
      h("form", { onsubmit: submit },
        h("div", { class: "columns" }, field("name", "Name", { required: true }), field("topic", "Topic", { required: true, placeholder: "job.report.daily" }), field("cron", "Cron", { required: true, placeholder: "0 6 * * 1-5, or @hourly" }), field("timezone", "Time zone", { value: "UTC" })),
        h("label", { class: "field" }, h("span", null, "Input (JSON object)"), h("textarea", { name: "input", spellcheck: "false", placeholder: "{}" })),
        problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
        h("button", { class: "primary" }, "Save the schedule")),
      h("p", { class: "soft" }, "To see the jobs of a schedule, follow the number in Fired. ", link("/dashboard/submit", null, "Submit a job once")));
  }

  async function submit(event) {
    event.preventDefault();
    const target = event.currentTarget;
    const given = Object.fromEntries(new FormData(target));
    try {
      const input = given.input.trim() ? JSON.parse(given.input) : undefined;
      await put(`/v1/schedules/${part(given.name)}`, { cron: given.cron, timezone: given.timezone || "UTC", job: { topic: given.topic, input } });
      problem = "";
      target.reset();
      notify(`Saved ${given.name}.`);
      await read();
    } catch (error) {
      problem = explain(error);
      ctx.update();
    }
  }
}
