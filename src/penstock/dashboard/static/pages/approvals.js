// Jobs that a rule holds until people approve them.

import { get, part, pointed, post } from "../api.js";
import { h } from "../dom.js";
import { action, command, empty, explain, facts, jobLink, notify, payloadView, quoted, section, since, until } from "../parts.js";
import { term } from "../words.js";

export default async function approvals(ctx) {
  let jobs, next;
  const inputs = new Map();

  async function read() {
    ({ jobs, next } = await get("/v1/jobs", { awaiting_approval: true, order: "oldest", limit: 50 }));
    await Promise.all(jobs.filter((job) => !inputs.has(job.job_id)).map(async (job) => {
      inputs.set(job.job_id, await pointed(job.request.context_ptr).catch((error) => ({ foreign: true, text: explain(error) })));
    }));
    ctx.update();
  }

  await read();
  const soon = ctx.soon(read);
  ctx.resync = read;
  ctx.follow({ approval: soon, counts: soon });
  ctx.every(10, ctx.update);

  async function decide(job, verb, form) {
    const reason = form.elements.reason.value.trim();
    await post(`/v1/jobs/${part(job.job_id)}/${verb}`, verb === "approve" ? { reason, snapshot: job.hold.snapshot } : { reason });
    notify(verb === "approve" ? "Approved." : "Rejected: it ends DENIED.");
    await read();
  }

  return {
    title: "Approvals",
    view: () => [
      h("h1", { tabindex: -1 }, "Approvals"),
      jobs.length ? null : empty("No job awaits approval. Rules with the decision require_approval hold jobs here."),
      jobs.map(card),
      next ? empty("The 50 oldest are shown.") : null,
    ],
  };

  function card(job) {
    const { terms, votes = [], until: end, rule_id, snapshot } = job.hold;
    const mine = votes.some((vote) => vote.by === ctx.me.name);
    return section(
      job.request.topic,
      { key: job.job_id, aside: h("span", null, jobLink(job.job_id), " ", since(job.accepted_at)) },
      facts([
        ["Asked for by", job.request.principal, term("principal")],
        ["Rule", rule_id, term("rule")],
        ["Why", job.verdict?.reason ?? ""],
        ["Approvals", `${votes.length} of ${terms.needed ?? 1}`, term("approval")],
        ["Approved by", votes.map((vote) => (vote.reason ? `${vote.by} (${vote.reason})` : vote.by)).join(", ")],
        ["Who may approve", (terms.approvers ?? []).join(", ") || "anybody with the role approve"],
        ["Expires", until(end), "The time limit for approvals."],
        ["Snapshot", snapshot, term("snapshot")],
      ]),
      h("details", { open: true }, h("summary", null, "What it would do"), payloadView(inputs.get(job.job_id))),
      ctx.may("approve_job")
        ? h("form", { class: "search", onsubmit: (event) => event.preventDefault() },
            h("input", { name: "reason", maxlength: 1000, "aria-label": `Reason for the decision about ${job.job_id}`, placeholder: "Reason (optional, kept with the job)", autocomplete: "off" }),
            action(mine ? "You approved" : "Approve", (event) => decide(job, "approve", event.target.form), { class: "primary", disabled: mine }),
            action("Reject", (event) => decide(job, "reject", event.target.form), { class: "danger" }))
        : empty("Your key may not approve jobs."),
      command(`penstock approve ${quoted(job.job_id)}`),
    );
  }
}
