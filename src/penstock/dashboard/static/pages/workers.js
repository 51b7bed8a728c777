// Pools, workers and limits: who can run what, and how full they are.

import { get, getOr, part, post } from "../api.js";
import { h } from "../dom.js";
import { count, plural, span } from "../format.js";
import { action, ask, badge, command, copyable, meter, notify, quoted, section, table, tags } from "../parts.js";
import { term } from "../words.js";

export default async function workersPage(ctx) {
  let pools, workers, limits, breakers;

  async function read() {
    [{ pools }, { workers }, { limits }, { breakers }] = await Promise.all([get("/v1/pools"), get("/v1/workers"), get("/v1/limits"), getOr({ breakers: [] }, "/v1/breakers")]);
    ctx.update();
  }

  await read();
  ctx.resync = read;
  const put = (list, name, one) => [...list.filter((other) => other[name] !== one[name]), one].sort((a, b) => (a[name] < b[name] ? -1 : 1));
  ctx.follow({
    worker(worker) {
      workers = put(workers, "worker_id", worker);
      ctx.update();
    },
    worker_gone({ worker_id }) {
      workers = workers.filter((one) => one.worker_id !== worker_id);
      ctx.update();
    },
    pool(pool) {
      pools = put(pools, "name", pool);
      ctx.update();
    },
  });
  ctx.every(5, async () => {
    ({ limits } = await get("/v1/limits"));
    ctx.update();
  });

  return {
    title: "Workers",
    view: () => [h("h1", { tabindex: -1 }, "Workers and pools"), poolTable(), workerTable(), limitTable(), breakers.length ? breakerTable() : null],
  };

  function poolTable() {
    return section("Pools", { key: "pools", about: term("pool") },
      table(
        [
          ["Pool", (pool) => h("b", null, pool.name)],
          ["State", (pool) => badge(pool.paused ? "PAUSED" : "READY", "pool"), { about: term("pause") }],
          ["Load", (pool) => meter(pool.held, pool.capacity ?? 0, pool.capacity === null ? plural(pool.held, "job") : `${count(pool.held)} of ${count(pool.capacity)}`), { about: `${term("held")} ${term("capacity")}` }],
          ["Workers", (pool) => count(pool.workers), { class: "number" }],
          ["Topics", (pool) => topics(pool.topics)],
          ["", (pool) => ctx.may("pause_pool") ? action(pool.paused ? "Resume" : "Pause", () => pause(pool), { "aria-label": `${pool.paused ? "Resume" : "Pause"} pool ${pool.name}` }) : ""],
        ],
        pools, { key: (pool) => pool.name, label: "Pools", none: "No pool yet: workers make them." }));
  }

  async function pause(pool) {
    const changed = await post(`/v1/pools/${part(pool.name)}/${pool.paused ? "resume" : "pause"}`);
    pools = put(pools, "name", changed);
    notify(changed.paused ? `Pool ${pool.name} gets no new jobs; ${plural(changed.held, "job")} ${changed.held === 1 ? "finishes" : "finish"}.` : `Pool ${pool.name} gets jobs again.`);
    ctx.update();
  }

  function workerTable() {
    return section("Workers", { key: "workers", about: term("worker") },
      table(
        [
          ["Worker", (worker) => h("span", null, worker.worker_id, worker.local ? h("span", { class: "tag" }, "in the engine") : null)],
          ["State", (worker) => badge(worker.status, "worker")],
          ["Pool", (worker) => worker.pool],
          ["Load", (worker) => meter(worker.held, worker.slots, `${count(worker.held)} of ${plural(worker.slots, "slot")}`), { about: `${term("load")} ${term("slot")}` }],
          ["Topics", (worker) => topics(worker.topics)],
          ["Where", (worker) => h("span", null, `${worker.host}, process ${worker.pid} `, tags(worker.labels))],
          ["Heard", (worker) => (worker.local ? "" : `${span(worker.silent_for)} ago`), { class: "number" }],
          ["", (worker) => (ctx.may("drain_worker") && !worker.local && worker.status === "ready" ? h("button", { type: "button", onclick: () => drain(worker), "aria-label": `Drain worker ${worker.worker_id}`, title: term("drain") }, "Drain …") : "")],
        ],
        workers, { key: (worker) => worker.worker_id, label: "Workers", none: ["No worker is connected. Start one: ", copyable("penstock worker start --app MODULE:APP")] }));
  }

  function drain(worker) {
    ask({
      title: `Drain worker ${worker.worker_id}?`,
      verb: "Drain",
      body: [h("p", null, `It gets nothing new, finishes ${plural(worker.held, "job")} and leaves.`), command(`penstock worker drain ${quoted(worker.worker_id)}`)],
      act: async () => {
        workers = put(workers, "worker_id", await post(`/v1/workers/${part(worker.worker_id)}/drain`));
        notify(`Worker ${worker.worker_id} is draining.`);
        ctx.update();
      },
    });
  }

  function topics(list) {
    const shown = list.slice(0, 4).join(", ");
    return h("span", { title: list.join("\n") }, list.length > 4 ? `${shown} and ${list.length - 4} more` : shown);
  }

  function limitTable() {
    return section("Limits", { key: "limits", about: term("limit") },
      table(
        [
          ["Limit", ({ limit }) => h("b", null, limit.name)],
          ["For", ({ limit }) => [...limit.topics, ...limit.tenants.map((tenant) => `tenant ${tenant}`), ...Object.entries(limit.labels).map(([name, value]) => `${name}=${value}`)].join(", ") || "all jobs"],
          ["By", ({ limit }) => limit.key.join(", ") || "shared", { about: "Jobs with the same values share the limit." }],
          ["At once", ({ limit }) => limit.concurrency ?? "", { class: "number", about: "Jobs with workers, at most." }],
          ["Rate", ({ limit }) => (limit.rate ? `${limit.rate.count} per ${span(limit.rate.per)}` : "")],
          ["May wait", ({ limit }) => limit.max_waiting ?? "", { class: "number", about: "Jobs that wait, at most; more are refused." }],
          ["Busiest now", ({ uses, limit }) => (uses.length ? h("span", null, uses[0].key.join(", ") || "all", " ", limit.concurrency ? meter(uses[0].running, limit.concurrency, `${uses[0].running} run, ${uses[0].waiting} wait`) : `${uses[0].running} run, ${uses[0].waiting} wait`) : "")],
        ],
        limits, { key: ({ limit }) => limit.name, label: "Limits", none: ["No limit is set. Set one: ", copyable("penstock limit create NAME --topic 'job.x.*' --concurrency 4")] }));
  }

  function breakerTable() {
    return section("Circuit breakers", { key: "breakers" },
      table(
        [
          ["Breaker", (one) => h("b", null, one.name)],
          ["State", (one) => badge(one.state, "breaker")],
          ["Failures in a row", (one) => `${one.failures} of ${one.threshold}`, { class: "number", about: "At the second number it opens." }],
          ["", (one) => (one.state !== "closed" && ctx.may("reset_breaker") ? action("Close", async () => { await post(`/v1/breakers/${part(one.name)}/reset`); await read(); }) : "")],
        ],
        breakers, { key: (one) => one.name, label: "Circuit breakers" }));
  }
}
