// A list of jobs. All that is chosen is in the URL. Rows change in place; new jobs come when asked for.

import { get, getOr, part, post } from "../api.js";
import { h } from "../dom.js";
import { compact, count, plural } from "../format.js";
import { ask, badge, command, empty, errorCode, icon, jobLink, link, notify, quoted, reasonField, runTime, since, tags } from "../parts.js";
import { ENDS, STATES, UNFINISHED, stateOf, term } from "../words.js";

const PAGE = 50;
const TIMES = [
  ["", "any time"],
  ["15m", "last 15 minutes"],
  ["1h", "last hour"],
  ["24h", "last 24 hours"],
  ["7d", "last 7 days"],
];
const SEARCHED = "The search box takes an id or its beginning, part of an id as *7zka*, part of a topic, label=value, or text of an error code or message. It does not look into inputs and logs.";
const MAX_SEARCHED = 20_000; // jobs in whose errors the engine looks for a text
const SECONDS = { m: 60, h: 3600, d: 86_400 };
const SIMPLE = ["topic", "tenant", "principal", "schedule", "workflow_id", "parent_job_id", "child_of", "error"];

/** The filter of the API that a URL of this page stands for. `topics` are those that are known. */
async function filterOf(query, topics) {
  const filter = {};
  for (const name of SIMPLE) if (query.get(name)) filter[name] = query.get(name);
  if (query.getAll("state").length) filter.state = query.getAll("state");
  if (query.getAll("label").length) filter.label = query.getAll("label");
  if (query.get("awaiting_approval")) filter.awaiting_approval = true;
  const time = /^(\d+)([mhd])$/.exec(query.get("since") ?? "");
  if (time) filter.accepted_from = Math.floor(Date.now() / 1000 - time[1] * SECONDS[time[2]]);
  const text = (query.get("q") ?? "").trim();
  if (/^[^=\s]+=./.test(text)) filter.label = [...(filter.label ?? []), text];
  else if (text.startsWith("job.")) filter.topic = /[*?[]/.test(text) ? text : `${text}*`;
  else if (text && topics.some((topic) => topic.includes(text))) filter.topic = `*${text}*`;
  else if (/[*?[]/.test(text)) filter.job_id = text;
  else if (text && (await isId(text))) filter.job_id = `${text}*`;
  else if (text) filter.error = text;
  return filter;
}

/** Whether an id begins so. */
async function isId(text) {
  return !/\s/.test(text) && (await get("/v1/jobs", { job_id: `${text}*`, limit: 1 })).jobs.length > 0;
}

/** The options of `penstock ps`, `cancel` and `retry` that mean the same. */
function optionsOf(filter) {
  const options = [];
  for (const state of filter.state ?? []) options.push("--state", state);
  for (const label of filter.label ?? []) options.push("--label", quoted(label));
  for (const [name, option] of [["topic", "--topic"], ["tenant", "--tenant"], ["principal", "--principal"], ["schedule", "--schedule"], ["workflow_id", "--workflow"]]) {
    if (filter[name]) options.push(option, quoted(filter[name]));
  }
  return options.join(" ");
}

export default async function jobs(ctx) {
  const [counts, schemas] = await Promise.all([get("/v1/counts"), ctx.may("submit_job") ? getOr({ topics: [] }, "/v1/topics/schemas") : { topics: [] }]);
  const topics = [...new Set([...schemas.topics.map((one) => one.topic), ...Object.keys(counts.topics)])].sort();
  const about = new Map(schemas.topics.map((one) => [one.topic, one.description || null]));
  const filter = await filterOf(ctx.query, topics);
  const dead = ctx.query.get("dead") === "true";
  const cursor = ctx.query.get("cursor");
  const isFirst = !cursor;
  let rows, next, total, why;
  let fresh = 0;
  const list = (more = {}) => get("/v1/jobs", { ...filter, dead, limit: PAGE, cursor, why: true, ...more });

  async function read() {
    const page = await list({ total: isFirst && !filter.error });
    ({ jobs: rows, next, why = {} } = page);
    total = filter.error && isFirst ? { count: rows.length, exact: !next } : page.total ?? total;
    fresh = 0;
    follow();
    ctx.update();
  }

  // -- live: rows change where they are, new ones are only counted ------------------------------

  let changed = new Set();
  const refreshSoon = ctx.soon(refresh);
  const countSoon = ctx.soon(countNew, 1500);

  function follow() {
    const ids = rows.map((job) => job.job_id);
    const touch = ({ job_id }) => {
      changed.add(job_id);
      refreshSoon();
    };
    ctx.follow(
      ids.length
        ? { job: touch, approval: touch, progress: touch, counts: counted }
        : { counts: counted },
      // An id that no job has keeps the stream of an empty list quiet.
      { job_id: ids.length ? ids : ["-"] },
    );
  }

  async function refresh() {
    const touched = changed;
    changed = new Set();
    const page = await list();
    const found = new Map(page.jobs.map((job) => [chain(job), job]));
    const gone = rows.filter((job) => touched.has(job.job_id) && !found.has(chain(job))).slice(0, 20);
    // What no longer matches the filter stays where it is, and shows what became of it.
    for (const job of await Promise.all(gone.map((one) => getOr(one, `/v1/jobs/${part(one.job_id)}`, { why: true })))) {
      found.set(chain(job), { ...job, left: true });
      if (job.why) page.why[job.job_id] = job.why;
    }
    const ids = rows.map((job) => job.job_id).join();
    rows = rows.map((job) => found.get(chain(job)) ?? job);
    why = { ...why, ...page.why };
    if (rows.map((job) => job.job_id).join() !== ids) follow();
    ctx.update();
  }

  function counted(states) {
    counts.states = states;
    ctx.update();
    if (isFirst) countSoon();
  }

  async function countNew() {
    const page = await get("/v1/jobs", { ...filter, dead, since: rows[0]?.seq, order: "oldest", limit: PAGE });
    const known = new Set(rows.map(chain));
    fresh = page.jobs.filter((job) => !known.has(chain(job))).length;
    ctx.update();
  }

  await read();
  ctx.resync = async () => {
    await refresh();
    if (isFirst) await countNew();
  };
  ctx.every(10, () => ctx.update()); // ages

  const go = (change) => {
    const query = new URLSearchParams(ctx.query);
    query.delete("cursor");
    change(query);
    ctx.go(`/dashboard/jobs?${query}`);
  };
  const FIELDS = { topic: topics, tenant: null, label: null };
  function search(event) {
    event.preventDefault();
    const given = new FormData(event.target);
    go((query) => {
      const text = given.get("q").trim();
      text ? query.set("q", text) : query.delete("q");
      for (const name of Object.keys(FIELDS)) {
        const value = given.get(name)?.trim();
        if (value) name === "label" ? query.append(name, value) : query.set(name, value);
      }
    });
  }
  const setOne = (name) => (event) => go((query) => (event.target.value ? query.set(name, event.target.value) : query.delete(name)));

  return {
    title: dead ? "Dead letters" : "Jobs",
    key: "jobs",
    view: () => [
      h("div", { class: "title" }, h("h1", { tabindex: -1, title: dead ? term("dead letter") : null }, dead ? "Dead letters" : "Jobs"), bulk()),
      filters(),
      h("p", { class: "line", role: "status" },
        total ? h("span", null, total.exact ? plural(total.count, "job") : `more than ${plural(total.count, "job")}`) : null,
        filter.error ? h("span", { class: "soft" }, searched()) : null,
        fresh ? h("button", { class: "fresh", type: "button", onclick: read }, `Show ${count(fresh)}${fresh === PAGE ? " or more" : ""} new`) : null),
      rows.length ? listing() : empty(isFirst && !Object.keys(filter).length && !dead ? ["No job yet. ", link("/dashboard/submit", null, "Submit one"), ", or run ", h("code", null, "penstock submit TOPIC --input '{…}'"), "."] : ["No job matches. Take a filter away to see more.", ctx.query.get("q") ? ` ${SEARCHED}` : ""]),
      h("nav", { class: "pages", "aria-label": "Pages of the list" },
        isFirst ? null : link(href((query) => query.delete("cursor")), null, "« Newest"),
        next ? link(href((query) => query.set("cursor", next)), null, "Older »") : null),
    ],
  };

  /** What was looked for in errors, and how far back. */
  function searched() {
    const failed = ENDS.slice(1).reduce((sum, state) => sum + (counts.states[state] ?? 0), 0);
    const reach = failed > MAX_SEARCHED ? `; the newest ${count(MAX_SEARCHED)} that match the other filters were searched` : "";
    return `that ended without success, with “${filter.error}” in the error code or message${reach}`;
  }

  function href(change) {
    const query = new URLSearchParams(ctx.query);
    change(query);
    return `/dashboard/jobs?${query}`;
  }

  // -- filters ---------------------------------------------------------------------------------

  function filters() {
    const chosen = new Set(ctx.query.getAll("state"));
    const toggle = (state) => href((query) => {
      query.delete("cursor");
      query.delete("state");
      for (const one of STATES) if (chosen.has(one) !== (one === state)) query.append("state", one);
    });
    const others = [...SIMPLE, "label"].flatMap((name) => ctx.query.getAll(name).map((value) => [name, value]));
    return h(
      "div",
      { class: "filters" },
      h("ul", { class: "chips", "aria-label": "States" }, STATES.map((state) =>
        h("li", { key: state }, link(toggle(state), { class: `chip state-${state}`, "aria-current": chosen.has(state) ? "true" : null, title: stateOf(state).meaning }, icon(state), state, " ", h("span", { class: "soft" }, compact(counts.states[state] ?? 0)))))),
      h(
        "form",
        { class: "search", role: "search", key: location.search, onsubmit: search },
        h("input", { type: "search", name: "q", value: ctx.query.get("q") ?? "", "aria-label": "Search by id, topic, label or error", placeholder: "id, topic, label or error  ( / )", title: SEARCHED, autocomplete: "off", spellcheck: "false" }),
        h("input", { name: "topic", list: "topics", "aria-label": "Topic", placeholder: "topic", title: `${term("topic")} As job.text.*`, autocomplete: "off", spellcheck: "false" }),
        h("datalist", { id: "topics" }, topics.map((topic) => h("option", { key: topic, value: topic }))),
        ctx.me.tenant ? null : h("input", { name: "tenant", "aria-label": "Tenant", placeholder: "tenant", title: term("tenant"), autocomplete: "off", spellcheck: "false" }),
        h("input", { name: "label", "aria-label": "Label", placeholder: "label=value", title: term("label"), pattern: "[^=\\s]+=.*", autocomplete: "off", spellcheck: "false" }),
        h("select", { "aria-label": "Accepted", value: ctx.query.get("since") ?? "", onchange: setOne("since") }, TIMES.map(([value, text]) => h("option", { value }, text))),
        h("select", { "aria-label": "Which jobs", value: dead ? "dead" : ctx.query.get("awaiting_approval") ? "approval" : "", onchange: (event) => go((query) => { query.delete("dead"); query.delete("awaiting_approval"); if (event.target.value === "dead") query.set("dead", "true"); if (event.target.value === "approval") query.set("awaiting_approval", "true"); }) },
          h("option", { value: "" }, "all jobs"), h("option", { value: "dead" }, "dead letters"), h("option", { value: "approval" }, "awaiting approval")),
        h("button", null, "Search"),
      ),
      others.length
        ? h("ul", { class: "chips", "aria-label": "Filters" }, others.map(([name, value]) =>
            h("li", { key: name + value }, link(href((query) => { query.delete("cursor"); query.delete(name, value); }), { class: "chip", title: "Take this filter away" }, `${name}: ${value} ✕`))))
        : null,
    );
  }

  // -- the table -------------------------------------------------------------------------------

  function listing() {
    const tenants = new Set(rows.map((job) => job.request.tenant ?? "default"));
    const showTenant = !ctx.me.tenant && (tenants.size > 1 || !tenants.has("default"));
    const showTries = rows.some((job) => (job.request.try_number ?? 1) > 1);
    return h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "jobs", "aria-label": "Jobs" },
        h("thead", null, h("tr", null, h("th", { scope: "col", title: term("state") }, "State"), h("th", { scope: "col", title: term("job") }, "Job"), h("th", { scope: "col", title: term("topic") }, "Topic"), showTenant ? h("th", { scope: "col", title: term("tenant") }, "Tenant") : null, showTries ? h("th", { scope: "col", title: term("try"), class: "number" }, "Tries") : null, h("th", { scope: "col", class: "number", title: term("age") }, "Age"), h("th", { scope: "col", class: "number", title: term("run time") }, "Took"), h("th", { scope: "col", title: "Why it waits, what is happening, or how it ended; if there is nothing to say, what jobs of its topic do." }, "Why, or what it does"))),
        h("tbody", null, rows.map((job) =>
          h(
            "tr",
            { key: chain(job), class: job.left ? "left" : null, title: job.left ? "It no longer matches the filter." : null },
            h("td", { "data-title": "State" }, badge(job.state)),
            h("td", { "data-title": "Job" }, jobLink(job.job_id)),
            h("td", { "data-title": "Topic", title: about.get(job.request.topic) }, job.request.topic, job.request.labels && Object.keys(job.request.labels).length ? h("div", null, tags(job.request.labels)) : null),
            showTenant ? h("td", { "data-title": "Tenant" }, job.request.tenant ?? "default") : null,
            showTries ? h("td", { "data-title": "Tries", class: "number" }, job.request.try_number ?? 1) : null,
            h("td", { "data-title": "Age", class: "number" }, since(job.accepted_at)),
            h("td", { "data-title": "Took", class: "number" }, runTime(job)),
            h("td", { "data-title": "Why", class: "why" }, h("div", { class: "clamp" }, note(job) || about.get(job.request.topic))),
          ))),
      ),
    );
  }

  function note(job) {
    if (why[job.job_id] && !job.finished_at) return why[job.job_id];
    const result = job.result;
    if (!result) return "";
    return result.error_code && result.error_code !== job.state ? [errorCode(result.error_code), ` ${result.error_message ?? ""}`] : result.error_message ?? "";
  }

  // -- many at once ----------------------------------------------------------------------------

  function bulk() {
    const canCancel = !dead && ctx.may("cancel_jobs");
    return h("div", { class: "buttons" },
      canCancel ? h("button", { type: "button", onclick: () => many("cancel") }, "Cancel matching …") : null,
      ctx.may("retry_jobs") ? h("button", { type: "button", onclick: () => many("retry") }, "Retry matching …") : null);
  }

  /** Say which jobs will be hit before anything is done. */
  async function many(verb) {
    const cancels = verb === "cancel";
    const given = { ...filter };
    if (cancels) given.state = (filter.state ?? UNFINISHED).filter((state) => UNFINISHED.includes(state));
    if (cancels && !given.state.length) return notify("No unfinished state is chosen: there is nothing to cancel.", "bad");
    const preview = await get(cancels ? "/v1/jobs" : "/v1/dead", { ...given, limit: 5, total: true });
    const number = preview.total.count;
    if (!number) return notify(cancels ? "No unfinished job matches." : "No dead letter matches.", "bad");
    const size = `${count(number)}${preview.total.exact ? "" : " or more"}`;
    const body = Object.keys(given).length ? given : { all: true };
    ask({
      title: `${cancels ? "Cancel" : "Retry"} ${size} ${number === 1 ? "job" : "jobs"}?`,
      verb: `${cancels ? "Cancel" : "Retry"} ${size}`,
      tone: cancels ? "danger" : "",
      type: number > 10 ? String(number) : "",
      body: [
        h("p", null, cancels ? "Every unfinished job that matches these filters is cancelled. Running work is ended." : "Every dead letter (ended FAILED or TIMEOUT, not retried) that matches is submitted again, and passes the rules again."),
        h("p", null, "Filters: ", Object.keys(given).length ? h("code", null, Object.entries(given).map(([name, value]) => `${name}=${value}`).join(" ")) : h("b", null, "none: all jobs that you see")),
        h("ul", { class: "sample" }, preview.jobs.map((job) => h("li", { key: job.job_id }, badge(job.state), " ", h("code", null, job.job_id), " ", job.request.topic)), number > preview.jobs.length ? h("li", { class: "soft" }, `and ${count(number - preview.jobs.length)} more`) : null),
        cancels ? reasonField("Reason (optional, kept with each job)") : null,
        filter.accepted_from || filter.job_id || filter.error ? null : command(`penstock ${verb} ${optionsOf(given) || "--all"}`),
      ],
      act: async ({ reason }) => {
        const done = await post(`/v1/jobs:${verb}`, cancels ? { ...body, reason: reason ?? "" } : body);
        const refused = done.refused.length ? `; ${plural(done.refused.length, "job")} refused: ${done.refused[0][1]}` : "";
        notify(`${plural(done.done, "job")} of ${count(done.matched)} ${cancels ? "cancelled" : "retried"}${refused}.`, refused ? "bad" : "good");
        await read();
      },
    });
  }
}

/** A job and its retries are one row. */
function chain(job) {
  return job.request.first_try ?? job.job_id;
}
