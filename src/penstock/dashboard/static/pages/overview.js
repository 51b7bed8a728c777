// What the machines are doing, and what needs a person.

import { get, getOr } from "../api.js";
import { lines, stack } from "../charts.js";
import { h } from "../dom.js";
import { clock, compact, count, percent, plural, span } from "../format.js";
import { badge, copyable, empty, errorCode, icon, link, meter, section, table } from "../parts.js";
import { ENDS, STATES, UNFINISHED, stateOf, term } from "../words.js";

const RANGES = [
  [15, "15 minutes"],
  [60, "1 hour"],
  [360, "6 hours"],
  [1440, "24 hours"],
];
const BARS = 60;

export default async function overview(ctx) {
  let minutes = Number(ctx.query.get("minutes"));
  if (!minutes) minutes = await recent();
  let status, counts, timeline, pools, workers, dead;
  const none = { pools: [], workers: [] };

  async function read() {
    [status, counts, timeline, { pools }, { workers }, dead] = await Promise.all([
      get("/v1/status"),
      get("/v1/counts"),
      get("/v1/timeline", { minutes }),
      ctx.may("list_pools") ? getOr(none, "/v1/pools") : none,
      ctx.may("list_workers") ? getOr(none, "/v1/workers") : none,
      get("/v1/dead", { limit: 1, total: true }),
    ]);
    ctx.update();
  }

  await read();
  let changed = false;
  ctx.resync = read;
  ctx.follow({
    counts(states) {
      counts.states = states;
      changed = true;
      ctx.update();
    },
    worker(worker) {
      workers = [...workers.filter((one) => one.worker_id !== worker.worker_id), worker].sort((a, b) => (a.worker_id < b.worker_id ? -1 : 1));
      ctx.update();
    },
    worker_gone({ worker_id }) {
      workers = workers.filter((one) => one.worker_id !== worker_id);
      ctx.update();
    },
    pool(pool) {
      pools = pools.map((one) => (one.name === pool.name ? pool : one));
      ctx.update();
    },
  });
  // The chart moves on by itself; what is costly is only read when something happened.
  ctx.every(3, () => {
    const happened = changed;
    changed = false;
    return happened && read();
  });
  ctx.every(30, read);

  return {
    title: "Overview",
    view: () => [
      h("h1", { tabindex: -1 }, "Overview"),
      needs(),
      tiles(),
      charts(),
      h("div", { class: "columns" }, failures(), topics()),
      ctx.may("list_workers") ? machines() : null,
    ],
  };

  // -- what needs a person ---------------------------------------------------------------------

  function needs() {
    const list = [];
    const add = (tone, href, ...text) => list.push(h("li", { key: String(text[0]) + list.length, class: tone, title: tone === "bad" && href.endsWith("dead=true") ? term("dead letter") : null }, href ? link(href, null, ...text) : h("span", null, ...text)));
    if (status.awaiting_approval) add("wait", "/dashboard/approvals", h("b", null, plural(status.awaiting_approval, "job")), ` ${status.awaiting_approval === 1 ? "awaits" : "await"} approval`);
    if (dead.total.count) add("bad", "/dashboard/jobs?dead=true", h("b", null, `${count(dead.total.count)}${dead.total.exact ? "" : "+"} dead ${dead.total.count === 1 ? "letter" : "letters"}`), ": ended FAILED or TIMEOUT, not retried");
    for (const pool of status.paused_pools) add("wait", "/dashboard/workers", "Pool ", h("b", null, pool), " is paused: its jobs wait");
    for (const [topic, why] of Object.entries(status.paused_topics)) add("bad", `/dashboard/jobs?topic=${encodeURIComponent(topic)}`, h("b", null, topic), ` can't run: ${why}`);
    if (status.policy_problem) add("bad", "/dashboard/policy", h("b", null, "The rule file was not accepted"), `: ${status.policy_problem}`);
    for (const worker of workers) if (worker.status === "missing") add("bad", "/dashboard/workers", "Worker ", h("b", null, worker.worker_id), ` is missing for ${span(worker.silent_for)}`);
    if (ctx.may("list_workers") && !workers.length) add("bad", "/dashboard/workers", h("b", null, "No worker is connected"), ": no job can run");
    return section("Needs a person", { class: `card needs ${list.length ? "" : "calm"}`, key: "needs" },
      list.length ? h("ul", null, list) : h("p", null, icon("SUCCEEDED"), " Nothing: no approval, failure, pause or missing worker waits for you."));
  }

  // -- counts ----------------------------------------------------------------------------------

  function tiles() {
    return h(
      "ul",
      { class: "tiles", "aria-label": "Jobs by state" },
      STATES.map((state) => {
        const number = counts.states[state] ?? 0;
        return h(
          "li",
          { key: state },
          link(`/dashboard/jobs?state=${state}`, { class: `tile state-${state} ${number ? "" : "zero"}`, title: stateOf(state).meaning },
            h("span", { class: "number" }, compact(number)), h("span", { class: "name" }, icon(state), state)),
        );
      }),
    );
  }

  // -- over time -------------------------------------------------------------------------------

  function charts() {
    const points = grouped(timeline.points, Math.ceil(minutes / BARS));
    const total = timeline.total;
    const ended = Object.values(total.ended).reduce((sum, n) => sum + n, 0);
    const good = total.ended.SUCCEEDED ?? 0;
    const when = (point) => clock(point.at, { millis: false });
    return section(
      "Over time",
      { key: "time", class: "card wide", aside: h("div", { class: "choices", role: "group", "aria-label": "Time" }, RANGES.map(([value, text]) =>
        link(`/dashboard/?minutes=${value}`, { key: value, "aria-current": value === minutes ? "true" : null }, text))) },
      h("dl", { class: "numbers" },
        number("Ended", compact(ended), `Jobs that ended in this time. ${term("try")}`),
        number("Per minute", (ended / minutes).toFixed(ended / minutes < 10 ? 1 : 0), term("throughput")),
        number("Succeeded", ended ? percent(good / ended) : "–", term("success rate")),
        number("Retried", compact(total.retried), term("retry")),
        number("Wait p50", total.wait_p50 === null ? "–" : span(total.wait_p50), term("p50")),
        number("Wait p99", total.wait_p99 === null ? "–" : span(total.wait_p99), term("p99"))),
      h("div", { class: "charts" },
        h("div", null, h("h3", { title: term("final") }, "Ended, by state"),
          stack(points.map((point) => ({ at: point.at, parts: point.ended })), ENDS, {
            label: "Jobs that ended, by state",
            tip: (point) => [when(point), ...ENDS.filter((state) => point.parts[state]).map((state) => `${count(point.parts[state])} ${state}`)].join("\n"),
          })),
        h("div", null, h("h3", { title: term("unfinished") }, "Unfinished, by state"),
          stack(points.map((point) => ({ ...point, parts: point.open })), UNFINISHED, {
            label: "Unfinished jobs, by state",
            tip: (point) => [when(point), ...UNFINISHED.filter((state) => point.parts[state]).map((state) => `${count(point.parts[state])} ${state}`), `${count(point.submitted)} submitted in this time`].join("\n"),
          })),
        h("div", null, h("h3", { title: "From when a job may start until it starts." }, "Waiting time"),
          lines(points, [
            { name: "p50", className: "accent", about: term("p50"), values: points.map((point) => point.wait_p50) },
            { name: "p99", className: "state-TIMEOUT", about: term("p99"), values: points.map((point) => point.wait_p99) },
          ], { label: "Waiting time of jobs that started", tip: (point) => (point.wait_p50 === null ? `${when(point)}\nno job started` : `${when(point)}\np50 ${span(point.wait_p50)}\np99 ${span(point.wait_p99)}`) }))),
    );
  }

  function number(name, value, about) {
    return h("div", { key: name, title: about }, h("dt", null, name), h("dd", null, value));
  }

  // -- failures and topics ---------------------------------------------------------------------

  function failures() {
    const most = Math.max(1, ...timeline.failures.map((one) => one.count));
    return section(
      "Failures by reason",
      { key: "failures", about: "Tries that did not succeed in the chosen time, with their error codes." },
      table(
        [
          ["Error", (one) => errorCode(one.error_code) ?? "–"],
          ["Topic", (one) => link(`/dashboard/jobs?topic=${encodeURIComponent(one.topic)}&${ENDS.slice(1).map((state) => `state=${state}`).join("&")}${one.error_code ? `&error=${encodeURIComponent(one.error_code)}` : ""}`, null, one.topic)],
          ["Tries", (one) => meter(one.count, most, count(one.count), "bad"), { about: "Tries that ended so, in the chosen time." }],
        ],
        timeline.failures.slice(0, 10),
        { key: (one) => `${one.topic} ${one.error_code}`, label: "Failures by reason", none: "No try failed in this time." },
      ),
      timeline.failures.length > 10 ? empty(`and ${count(timeline.failures.length - 10)} more`) : null,
    );
  }

  function topics() {
    const rows = Object.entries(counts.topics).sort(([, a], [, b]) => sum(b) - sum(a));
    return section(
      "Unfinished by topic",
      { key: "topics", about: term("topic") },
      table(
        [
          ["Topic", ([topic]) => link(`/dashboard/jobs?topic=${encodeURIComponent(topic)}&${UNFINISHED.map((state) => `state=${state}`).join("&")}`, null, topic)],
          ...UNFINISHED.map((state) => [state, ([, states]) => (states[state] ? count(states[state]) : ""), { class: "number", head: h("span", { class: `state-${state} head` }, state), about: `${state}: ${stateOf(state).meaning}` }]),
        ],
        rows.slice(0, 10),
        { key: ([topic]) => topic, label: "Unfinished jobs by topic", none: "No job is unfinished." },
      ),
    );
  }

  // -- pools and workers -----------------------------------------------------------------------

  function machines() {
    return section(
      "Pools and workers",
      { key: "machines", aside: link("/dashboard/workers", null, "All") },
      table(
        [
          ["Worker", (one) => h("span", null, one.worker_id, one.local ? h("span", { class: "tag" }, "in the engine") : null)],
          ["Pool", (one) => h("span", null, one.pool, pools.find((pool) => pool.name === one.pool)?.paused ? badge("PAUSED", "pool") : null)],
          ["State", (one) => badge(one.status, "worker")],
          ["Load", (one) => meter(one.held, one.slots, `${count(one.held)} of ${plural(one.slots, "slot")}`), { about: `${term("load")} ${term("slot")}` }],
        ],
        workers.slice(0, 20),
        { key: (one) => one.worker_id, label: "Workers", none: ["No worker is connected. Start one: ", copyable("penstock worker start --app MODULE:APP")] },
      ),
      workers.length > 20 ? empty(`and ${count(workers.length - 20)} more`) : null,
    );
  }
}

const sum = (states) => Object.values(states).reduce((all, n) => all + n, 0);

/** Fewer points: several minutes become one. */
function grouped(points, size) {
  if (size <= 1) return points;
  const found = [];
  for (let end = points.length; end > 0; end -= size) {
    const some = points.slice(Math.max(0, end - size), end);
    const ended = {};
    for (const point of some) for (const [state, n] of Object.entries(point.ended)) ended[state] = (ended[state] ?? 0) + n;
    const most = (field) => some.reduce((top, point) => (point[field] === null ? top : Math.max(top ?? 0, point[field])), null);
    found.unshift({
      at: some[0].at,
      submitted: some.reduce((all, point) => all + point.submitted, 0),
      ended,
      open: some.at(-1).open,
      wait_p50: most("wait_p50"),
      wait_p99: most("wait_p99"),
    });
  }
  return found;
}

/** The shortest range that has all that happened today, at most an hour: a new engine's charts are not mostly empty. */
async function recent() {
  const { points } = await get("/v1/timeline", { minutes: 60 });
  const first = points.findIndex((point) => point.submitted || sum(point.ended) || sum(point.open));
  return first >= 60 - RANGES[0][0] ? RANGES[0][0] : 60;
}
