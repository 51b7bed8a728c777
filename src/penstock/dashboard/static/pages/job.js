// One job: where it is and why, what it may do next, how it got there, what it took and made.

import { get, getOr, part, payload, pointed, post } from "../api.js";
import { diagram, waterfall } from "../charts.js";
import { h } from "../dom.js";
import { canonicalWay, ownWay } from "../lifecycles.js";
import { bytes, count, plural, shortId, span } from "../format.js";
import { LogView } from "../logs.js";
import { action, ask, badge, command, copyable, empty, errorCode, facts, jobLink, link, meter, moment, notify, payloadView, quoted, reasonField, section, since, table, tags, until } from "../parts.js";
import { UNFINISHED, isLegal, lifecycle, stateOf, term } from "../words.js";
import { containerOf } from "./containers.js";
import { stages } from "./run.js";

const CHILDREN = 20;
const WAYS = {
  canonical: "The lifecycle that every job of the engine has.",
  container: "The same job in the words of the container protocol.",
  pipeline: "The pipeline's own lifecycle: what happens while its job is RUNNING.",
  batch: "The batch's own lifecycle, in OpenAI's words: what happens while its job is RUNNING.",
  processor: "What each node of the split model does with the job while it is RUNNING.",
};

export default async function jobPage(ctx, id) {
  const path = `/v1/jobs/${part(id)}`;
  let job, history, tries, children, childCounts, policy, run, batch, container, input, result;
  let progress = null;
  const log = new LogView(ctx.update);

  async function read() {
    const before = job?.version;
    job = await get(path, { why: true });
    const first = job.request.first_try ?? id;
    const { topic } = job.request;
    [{ transitions: history }, { jobs: tries }, childCounts, run, batch, container] = await Promise.all([
      get(`${path}/history`),
      get("/v1/jobs", { first_try: first, limit: 20 }),
      get(`${path}/children/counts`).then(({ counts }) => counts),
      /^job\.pipeline\.[^.]+$/.test(topic) ? getOr(null, `/v1/runs/${part(id)}`) : null,
      topic === "job.batch" ? getOr(null, `/v1/batches/${part(id)}`) : null,
      topic.startsWith("job.container.") ? containerOf(job, ctx) : null,
    ]);
    tries.sort((a, b) => a.seq - b.seq);
    children = Object.keys(childCounts).length ? (await get("/v1/jobs", { child_of: first, limit: CHILDREN, why: true })) : { jobs: [], why: {} };
    if (before !== job.version) policy = await getOr(null, `${path}/policy`);
    if (result === undefined && job.state === "SUCCEEDED" && job.result?.result_ptr) result = withHops(await quietly(`${path}/result`));
    ctx.update();
  }

  function withHops(found) {
    try {
      return /^job\.chat\./.test(job.request.topic) ? { ...found, hops: JSON.parse(found.text).hops } : found;
    } catch {
      return found;
    }
  }

  async function quietly(at) {
    try {
      return await payload(at);
    } catch (error) {
      return { type: "text/plain", size: 0, text: error.message, path: at };
    }
  }

  const { topics } = ctx.may("submit_job") ? await getOr({ topics: [] }, "/v1/topics/schemas") : { topics: [] };
  await read();
  input = await pointed(job.request.context_ptr).catch((error) => ({ foreign: true, text: error.message }));

  const soon = ctx.soon(read, 150);
  const ids = [id, ...tries.map((one) => one.job_id)];
  ctx.resync = read;
  ctx.follow(
    {
      job: soon,
      approval: soon,
      note: soon,
      log(line) {
        log.add(line);
        ctx.update();
      },
      progress(told) {
        if (told.job_id !== id) return;
        progress = told;
        if (run) soon();
        ctx.update();
      },
    },
    { job_id: [...new Set(ids)], log: [id] },
  );
  ctx.every(1, () => !job.finished_at && ctx.update());
  ctx.every(5, () => !job.finished_at && soon());

  return {
    title: `${job.request.topic} ${shortId(id)}`,
    key: id,
    view: () => [
      header(),
      whyBox(),
      outcome(),
      section("Lifecycle", { key: "lifecycle", about: "The states that this kind of job can be in, and its way through them." }, ways(), journal()),
      route(),
      run ? section("Stages", { key: "stages", about: term("pipeline") }, stages(ctx, run)) : null,
      container ? section("Container", { key: "container", about: term("image") }, containerFacts()) : null,
      section("Attempts and children", { key: "waterfall", about: `${term("attempt")} ${term("retry")}` }, timeline(), childTable()),
      section("Log", { key: "log", about: term("log") }, log.view()),
      h("div", { class: "columns", key: "details" },
        section("Input", null, payloadView(input)),
        section("Request", null, requestFacts())),
      decision(),
    ],
  };

  // -- the top ---------------------------------------------------------------------------------

  function header() {
    return h(
      "div",
      { class: "title job", key: "title" },
      h("div", null,
        h("h1", { tabindex: -1 }, job.request.topic, " ", badge(job.state)),
        h("p", { class: "soft line" }, copyable(id), (job.request.try_number ?? 1) > 1 ? h("span", null, `try ${job.request.try_number}`) : null, h("span", null, "accepted ", since(job.accepted_at)), job.request.tenant && !ctx.me.tenant ? h("span", null, `tenant ${job.request.tenant}`) : null),
        description() ? h("p", null, description()) : null),
      buttons(),
    );
  }

  /** What jobs of this topic do, in the words of whoever wrote them. */
  function description() {
    return topics.find((one) => one.topic === job.request.topic)?.description;
  }

  /** Only what is legal now, and what this person may do. */
  function buttons() {
    const isFinal = stateOf(job.state).final;
    const canRetry = isFinal && job.state !== "SUCCEEDED" && !job.successor && ctx.may("retry_job");
    const awaits = job.hold && !isFinal && (job.hold.votes ?? []).length < (job.hold.terms.needed ?? 1);
    return h(
      "div",
      { class: "buttons" },
      awaits && ctx.may("approve_job") ? h("button", { class: "primary", type: "button", onclick: () => decide("approve") }, "Approve …") : null,
      awaits && ctx.may("reject_job") ? h("button", { type: "button", onclick: () => decide("reject") }, "Reject …") : null,
      isLegal(job.state, "cancel") && ctx.may("cancel_job") ? h("button", { class: "danger", type: "button", onclick: cancel, disabled: job.cancel_requested }, job.cancel_requested ? "Cancelling" : "Cancel …") : null,
      canRetry ? action("Retry", retry, { class: "primary" }) : null,
      ctx.may("submit_job") && isFinal ? link(`/dashboard/submit?topic=${encodeURIComponent(job.request.topic)}&from=${encodeURIComponent(id)}`, { class: "button" }, "Submit again …") : null,
    );
  }

  function cancel() {
    const open = UNFINISHED.reduce((sum, state) => sum + (childCounts[state] ?? 0), 0);
    ask({
      title: "Cancel this job?",
      verb: "Cancel the job",
      tone: "danger",
      body: [h("p", null, "It ends CANCELLED. Work that is running is ended."),
        open ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "children" }), `Cancel its ${plural(open, "unfinished child", "unfinished children")}, too`) : null,
        reasonField(), command(`penstock cancel ${quoted(id)}`)],
      act: async ({ reason, children: all }) => {
        const done = await post(`${path}/cancel`, { reason, children: all === "on" });
        notify(done.job.state === "CANCELLED" ? "Cancelled." : done.ended ? `It had ended already: ${done.job.state}.` : "It was asked to end.");
        await read();
      },
    });
  }

  function decide(verb) {
    const approves = verb === "approve";
    ask({
      title: approves ? "Approve this job?" : "Reject this job?",
      verb: approves ? "Approve" : "Reject",
      tone: approves ? "" : "danger",
      body: [h("p", null, approves ? "It runs once enough people have approved." : "It ends DENIED and never runs."), reasonField(), command(`penstock ${verb} ${quoted(id)}`)],
      act: async ({ reason }) => {
        await post(`${path}/${verb}`, approves ? { reason, snapshot: job.hold.snapshot } : { reason });
        notify(approves ? "Approved." : "Rejected.");
        await read();
      },
    });
  }

  async function retry() {
    const again = await post(`${path}/retry`);
    notify("Submitted again.");
    ctx.go(`/dashboard/jobs/${part(again.job_id)}`);
  }

  // -- why -------------------------------------------------------------------------------------

  function whyBox() {
    const waits = ["PENDING", "SCHEDULED"].includes(job.state);
    const final = stateOf(job.state).final;
    const title = waits ? "Why it waits" : final ? "How it ended" : "What is happening";
    const told = progress;
    const shows = told && !final && told.fraction !== null; // then the sentence need not say how far it is
    return h(
      "section",
      { class: `why-box state-${job.state}`, key: "why", role: "status" },
      h("h2", null, title),
      h("p", null, final ? ending() : (shows ? job.why.split("; ").at(-1) : job.why) || stateOf(job.state).meaning),
      shows ? meter(told.fraction, 1, `${Math.round(told.fraction * 100)}% ${told.message ?? ""}`) : null,
      job.hold && !final ? hold() : null,
      job.request.after?.length && waits ? h("p", null, "It runs after: ", job.request.after.map((parent) => [jobLink(parent), " "])) : null,
      job.successor ? h("p", null, "Retried as ", jobLink(job.successor, { whole: true })) : null,
    );
  }

  /** How it ended; an error is told below, with its traceback. */
  function ending() {
    const ran = job.started_at ? `it ran for ${span(job.finished_at - job.started_at)}` : "it never ran";
    const said = `${stateOf(job.state).meaning} That was ${span(job.finished_at - job.accepted_at)} after it was accepted; ${ran}.`;
    const message = job.result?.error_message;
    const code = job.result?.error_code;
    return ["CANCELLED", "DENIED"].includes(job.state) && message ? [said, h("br"), code === job.state ? null : [errorCode(code), " "], message] : said;
  }

  function hold() {
    const { terms, votes = [], until: end, rule_id } = job.hold;
    return facts([
      ["Rule", rule_id, term("rule")],
      ["Approvals", `${votes.length} of ${terms.needed ?? 1}`, term("approval")],
      ["Who may approve", (terms.approvers ?? []).join(", ") || "anybody with the role approve"],
      ["Approved by", votes.map((vote) => vote.by).join(", ")],
      ["Expires", until(end), "The time limit for approvals."],
    ]);
  }

  // -- result or error -------------------------------------------------------------------------

  function outcome() {
    const end = job.result;
    if (!end) return null;
    const artifacts = end.artifacts ?? [];
    const failed = job.state !== "SUCCEEDED";
    const told = !["CANCELLED", "DENIED"].includes(job.state) && (end.error_message || end.error_code);
    if (failed && !told && !end.traceback && !artifacts.length) return null;
    return section(
      failed ? "Error" : "Result",
      { key: "outcome", about: term("result"), class: `card outcome ${failed ? "bad" : ""}` },
      told ? h("p", { class: "error" }, errorCode(end.error_code), " ", h("span", { class: "message" }, end.error_message)) : null,
      end.traceback ? h("details", null, h("summary", null, "Traceback"), h("pre", { tabindex: 0 }, end.traceback)) : null,
      job.state === "SUCCEEDED" ? (result ? payloadView(result) : empty("It returned nothing.")) : null,
      artifacts.length ? h("h3", { title: term("artifact") }, "Artifacts") : null,
      artifacts.length ? table(
        [
          ["Name", (one) => h("a", { href: `${path}/artifacts/${one.name.split("/").map(part).join("/")}`, download: one.name.split("/").pop() }, one.name)],
          ["Type", (one) => one.media_type],
          ["Size", (one) => bytes(one.size), { class: "number", about: "Of the file." }],
        ],
        artifacts, { key: (one) => one.name, label: "Artifacts" }) : null,
      artifacts.filter((one) => /^image\/(?:png|jpeg|gif|webp)$/.test(one.media_type)).slice(0, 4).map((one) =>
        h("img", { class: "result", key: one.name, alt: one.name, src: `${path}/artifacts/${one.name.split("/").map(part).join("/")}` })),
    );
  }

  function containerFacts() {
    const { image, exit_code, usage = {} } = container;
    return facts([
      ["Image", image ? h("code", null, image) : ""],
      ["Exit code", exit_code ?? "", term("exit code")],
      ["Peak memory", usage.peak_memory_bytes ? bytes(usage.peak_memory_bytes) : "", term("peak memory")],
      ["Processor time", usage.cpu_seconds != null ? span(usage.cpu_seconds) : "", term("processor time")],
    ]);
  }

  // -- its way over the nodes of a split model --------------------------------------------------

  function route() {
    const hops = result?.hops;
    if (!hops?.length) return null;
    const longest = Math.max(...hops.map((hop) => hop.compute_ms + hop.queue_ms + hop.network_ms));
    const each = (field) => (hop) => span(hop[field] / 1000);
    return section("Route over nodes", { key: "route", about: term("route") },
      table(
        [
          ["Node", (hop) => hop.node],
          ["Layers", (hop) => hop.layers],
          ["Time", (hop) => meter(hop.compute_ms + hop.queue_ms + hop.network_ms, longest, span((hop.compute_ms + hop.queue_ms + hop.network_ms) / 1000)), { about: "All that this hop took, over all tokens." }],
          ["Compute", each("compute_ms"), { class: "number", about: "Time in which the node computed." }],
          ["Queue", each("queue_ms"), { class: "number", about: "From arrival at the node to the beginning of its computation." }],
          ["Network", each("network_ms"), { class: "number", about: "On the way to the node." }],
          ["Passes", (hop) => count(hop.passes), { class: "number", about: "How often the job went through it." }],
        ],
        hops, { key: (hop) => `${hop.node} ${hop.layers}`, label: "Route over nodes" }));
  }

  // -- its way ---------------------------------------------------------------------------------

  function ways() {
    const own = ownWay(job, history, { run, batch, hops: result?.hops });
    const whole = canonicalWay(job, history);
    if (!own) return diagram(whole.name, whole);
    return [whole, own].map((way) => [h("h3", { key: `name of ${way.name}`, title: WAYS[way.name] }, lifecycle(way.name).name), diagram(way.name, way)]);
  }

  function journal() {
    return h("details", { class: "journal", open: innerWidth > 800 },
      h("summary", null, plural(history.length, "entry", "entries")),
      table(
        [
          ["Time", (entry) => moment(entry.at)],
          ["After", (entry) => (entry.n === 1 ? "" : `+${span(entry.at - history[0].at)}`), { class: "number", about: "Since the job was accepted." }],
          ["Event", (entry) => entry.event],
          ["State", (entry) => (entry.before === entry.after ? h("span", { class: "soft" }, entry.after) : badge(entry.after))],
          ["Attempt", (entry) => entry.attempt || "", { class: "number", about: term("attempt") }],
          ["By", (entry) => entry.actor, { class: "by" }],
          ["Reason", (entry) => entry.reason ? h("span", { class: "message" }, entry.reason) : entry.worker_id ? `to ${entry.worker_id}` : ""],
        ],
        history, { key: (entry) => entry.n, label: "History" }));
  }

  // -- attempts, retries, children -------------------------------------------------------------

  function timeline() {
    const now = Date.now() / 1000;
    const rows = [];
    for (const one of tries) {
      const label = `try ${one.request.try_number ?? 1}`;
      rows.push({ key: one.job_id, label: one.job_id === id ? label : jobLinkWith(one.job_id, label), parts: one.job_id === id ? attempts(now) : segments(one, now) });
    }
    if (run) {
      for (const stage of Object.values(run.stage_progress)) {
        if (stage.started_at) rows.push({ key: `stage ${stage.name}`, depth: 1, label: stage.name, parts: [{ from: stage.started_at, to: stage.finished_at ?? undefined, state: stateOf(stage.status).like, title: `${stage.name}: ${stage.status}` }] });
      }
    }
    for (const child of [...children.jobs].reverse()) rows.push({ key: child.job_id, depth: 1, label: jobLinkWith(child.job_id, child.request.topic), parts: segments(child, now) });
    return waterfall(rows, now);
  }

  function jobLinkWith(job_id, text) {
    return link(`/dashboard/jobs/${part(job_id)}`, { title: job_id }, text);
  }

  /** The parts of a job by its record alone. */
  function segments(one, now) {
    const end = one.finished_at ?? now;
    const parts = [{ from: one.accepted_at, to: one.dispatched_at ?? end, state: "SCHEDULED", title: `waited ${span((one.dispatched_at ?? end) - one.accepted_at)}` }];
    if (one.dispatched_at && one.started_at) parts.push({ from: one.dispatched_at, to: one.started_at, state: "DISPATCHED", title: "given to a worker" });
    if (one.started_at) parts.push({ from: one.started_at, to: end, state: one.finished_at ? one.state : "RUNNING", title: `ran ${span(end - one.started_at)}: ${one.state}` });
    return parts;
  }

  /** The parts of this job, by its history: each attempt by itself. */
  function attempts(now) {
    const moves = history.filter((entry) => entry.before !== entry.after || entry.event === "redispatch");
    return moves.filter((entry) => !stateOf(entry.after).final).map((entry) => {
      const next = moves[moves.indexOf(entry) + 1];
      const to = next?.at ?? (job.finished_at ?? now);
      const ended = next && stateOf(next.after).final;
      const state = entry.after === "RUNNING" && ended ? next.after : entry.after;
      const attempt = entry.attempt > 1 ? `attempt ${entry.attempt}, ` : "";
      return { from: entry.at, to, state, title: `${attempt}${entry.after} for ${span(to - entry.at)}${ended ? `, then ${next.after}` : ""}` };
    });
  }

  function childTable() {
    const total = Object.values(childCounts).reduce((sum, n) => sum + n, 0);
    if (!total) return null;
    return h("div", null,
      h("p", { class: "line" }, h("b", null, plural(total, "child", "children")), Object.entries(childCounts).map(([state, n]) => h("span", { key: state }, badge(state), ` ${count(n)}`)),
        link(`/dashboard/jobs?child_of=${encodeURIComponent(job.request.first_try ?? id)}`, null, "List them")));
  }

  // -- request and policy ----------------------------------------------------------------------

  function requestFacts() {
    const request = job.request;
    return facts([
      ["Topic", request.topic, term("topic")],
      ["Tenant", request.tenant ?? "default", term("tenant")],
      ["Submitted by", request.principal, term("principal")],
      ["Priority", request.priority ?? "batch", term("priority")],
      ["Labels", request.labels && Object.keys(request.labels).length ? tags(request.labels) : ""],
      ["Schedule", request.schedule ? link(`/dashboard/jobs?schedule=${encodeURIComponent(request.schedule)}`, null, request.schedule) : "", term("schedule")],
      ["Workflow", request.workflow_id ? link(`/dashboard/jobs?workflow_id=${encodeURIComponent(request.workflow_id)}`, null, request.workflow_id) : "", term("workflow")],
      ["Child of", request.child_of ? jobLink(request.child_of) : ""],
      ["Parent", request.parent_job_id ? jobLink(request.parent_job_id) : ""],
      ["Worker", job.worker_id ?? "", term("worker")],
      ["Pool", job.pool ?? "", term("pool")],
      ["Attempt", job.attempt || "", term("attempt")],
      ["Timeout", request.timeout ? span(request.timeout) : ""],
      ["Not before", request.run_at ? moment(request.run_at) : "", "It does not start before."],
      ["Deadline", request.deadline ? moment(request.deadline) : ""],
      ["Retries", request.retry?.retries ? `up to ${request.retry.retries}` : "", term("retry")],
      ["Idempotent", request.idempotent ? "yes" : "", "Safe to run again."],
      ["Idempotency key", request.idempotency_key ?? ""],
      ["Capability", request.capability ?? ""],
      ["Risk tags", (request.risk_tags ?? []).join(", ")],
    ]);
  }

  function decision() {
    if (!policy) return null;
    const verdict = policy.then ?? policy.now;
    return section(
      "Policy decision",
      { key: "policy", about: term("verdict") },
      policy.then ? null : empty(job.finished_at ? "It was not judged: no rules were set." : "It was not judged yet. By the rules in force:"),
      facts([
        ["Decision", verdict.decision.replaceAll("_", " ")],
        ["Rule", verdict.rule_id, term("rule")],
        ["Snapshot", verdict.snapshot, term("snapshot")],
        ["Reason", verdict.reason ?? ""],
        ["Constraints", verdict.constraints ? h("code", null, JSON.stringify(verdict.constraints)) : ""],
        ["Now", policy.then && (policy.now.decision !== policy.then.decision || policy.now.rule_id !== policy.then.rule_id) ? `the rules in force would say: ${policy.now.decision.replaceAll("_", " ")} (${policy.now.rule_id})` : ""],
      ]),
      policy.trace.length ? h("details", null, h("summary", null, `How the rules in force judge it: ${plural(policy.trace.length, "rule")} tried`),
        policy.trace.map((rule) => h("div", { class: "trace", key: rule.rule_id },
          h("p", null, badge(rule.matched ? "OK" : "SKIPPED", "rule"), " ", h("b", null, rule.rule_id), rule.matched ? " matches" : " does not match"),
          rule.conditions.length ? table([["Field", (one) => one.field], ["Wanted", (one) => h("code", null, one.wanted)], ["Found", (one) => h("code", null, one.found)], ["Matches", (one) => (one.matched ? "yes" : "no")]], rule.conditions, { key: (one) => one.field, label: `Conditions of ${rule.rule_id}` }) : null))) : null,
    );
  }
}
