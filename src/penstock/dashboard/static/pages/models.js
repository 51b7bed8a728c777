// Language models, and the nodes over which models are split.

import { get, getOr } from "../api.js";
import { key } from "../charts.js";
import { h } from "../dom.js";
import { bytes, compact, count, percent, span } from "../format.js";
import { badge, copyable, empty, link, meter, section, table } from "../parts.js";
import { UNFINISHED, term } from "../words.js";

export default async function models(ctx) {
  let list, status, counts, pipes, workers;
  const counted = new Map();

  async function read() {
    [{ data: list }, status, counts, pipes, { workers }] = await Promise.all([
      get("/v1/models"),
      get("/v1/status"),
      get("/v1/counts"),
      ctx.may("get_pipes") ? getOr({ pipes: [], nodes: [] }, "/v1/pipes") : { pipes: [], nodes: [] },
      ctx.may("list_workers") ? get("/v1/workers") : { workers: [] },
    ]);
    measure();
    ctx.update();
  }

  /** Workers count tokens; their rate is the difference between two looks. */
  function measure() {
    const now = performance.now() / 1000;
    for (const topic of Object.keys(status.models)) {
      const before = counted.get(topic);
      const tokens = workers.reduce((sum, worker) => sum + (worker.facts?.tokens?.[topic]?.completion ?? 0), 0);
      if (before && now - before.at < 1) continue;
      counted.set(topic, { at: now, tokens, rate: before && tokens >= before.tokens ? (tokens - before.tokens) / (now - before.at) : null });
    }
  }

  await read();
  let changed = false;
  ctx.resync = read;
  ctx.follow({
    counts: () => (changed = true),
    nodes(view) {
      pipes = view;
      ctx.update();
    },
  });
  ctx.every(2, () => {
    const happened = changed;
    changed = false;
    return happened && read();
  });
  ctx.every(5, read);

  const topicOf = (model) => [`job.llm.${model.id}`, `job.chat.${model.id}`].find((topic) => topic in status.models) ?? `job.llm.${model.id}`;
  const queue = (model, states) => states.reduce((sum, state) => sum + (counts.topics[topicOf(model)]?.[state] ?? 0), 0);

  const rate = (model) => {
    const measured = counted.get(topicOf(model))?.rate;
    return measured == null ? "" : measured.toFixed(1);
  };

  const firstToken = (model) => {
    const milliseconds = status.models[topicOf(model)]?.first_token_ms;
    return milliseconds ? span(milliseconds / 1000) : "";
  };

  return {
    title: "Models",
    view: () => [
      h("h1", { tabindex: -1 }, "Models and nodes"),
      section("Language models", { key: "models" },
        table(
          [
            ["Model", (model) => link(`/dashboard/chat?model=${encodeURIComponent(model.id)}`, { title: "Chat with it" }, model.id)],
            ["Health", (model) => h("span", null, badge(model.state ?? "READY", "model"), model.cause ? h("span", { class: "message" }, ` ${model.cause}`) : null)],
            ["Waiting", (model) => count(queue(model, UNFINISHED.slice(0, 2))), { class: "number" }],
            ["Running", (model) => count(queue(model, UNFINISHED.slice(2))), { class: "number" }],
            ["Tokens/s", (model) => rate(model), { class: "number" }],
            ["First token", (model) => firstToken(model), { class: "number", about: term("time to first token") }],
            ["Context", (model) => (model.context_length ? `${count(model.context_length)} tokens` : ""), { class: "number", about: "Its window of tokens, prompt and answer." }],
            ["Parameters", (model) => (status.models[topicOf(model)]?.parameters ? compact(status.models[topicOf(model)].parameters) : ""), { class: "number" }],
            ["Size", (model) => (status.models[topicOf(model)]?.size ? bytes(status.models[topicOf(model)].size) : ""), { class: "number", about: "Of its weights." }],
            ["Kind", (model) => [status.models[topicOf(model)]?.architecture, status.models[topicOf(model)]?.quantisation].filter(Boolean).join(", ")],
          ],
          list, { key: (model) => model.id, label: "Language models", none: ["No language model is served. Start one: ", copyable("penstock up --model NAME")] })),
      pipes.pipes.map(pipeCard),
      pipes.nodes.length ? nodeTable() : section("Nodes", { key: "nodes", about: term("node") }, empty("No model is split over nodes here. Start a node: ", copyable("penstock node up --model NAME"))),
    ],
  };

  /** Which node holds which layers, and the way that a job would go now. */
  function pipeCard(pipe) {
    const holders = pipes.nodes.flatMap((node) => node.segments.filter((segment) => segment.model === pipe.model).map((segment) => ({ node, segment })));
    const used = new Set(pipe.hops.map((hop) => `${hop.node_id} ${hop.layers}`));
    const x = (layer) => `${(layer / Math.max(1, pipe.num_layers)) * 100}%`;
    return section(
      `${pipe.model} over nodes`,
      { key: pipe.model, about: term("pipe"), aside: badge(pipe.complete ? "COMPLETE" : "INCOMPLETE", "pipe") },
      pipe.complete ? h("p", null, `A job's route: ${pipe.hops.map((hop) => `${hop.node_id} (layers ${hop.layers})`).join(" → ")}; a token is expected to take ${pipe.token_ms.toFixed(1)} ms.`) : h("p", { class: "problem" }, `${pipe.reason || "Not complete"}${pipe.missing ? `. Missing layers: ${pipe.missing}` : ""}`),
      h("div", { class: "waterfall" }, holders.map(({ node, segment }) =>
        h("div", { class: "row", key: `${node.node_id} ${segment.layers}` },
          h("div", { class: "label", title: node.address }, node.node_id),
          h("svg", { class: "bars", role: "img", "aria-label": `layers ${segment.layers} of ${pipe.num_layers}, ${segment.state}` },
            h("rect", { class: `bar state-${segment.state === "ready" ? (used.has(`${node.node_id} ${segment.layers}`) ? "RUNNING" : "SUCCEEDED") : "DISPATCHED"}`, x: x(segment.start), width: x(segment.end - segment.start), y: 4, height: 14, rx: 2 }, h("title", null, `layers ${segment.layers}, ${segment.dtype}, ${segment.layer_ms.toFixed(2)} ms a layer`))),
          h("div", { class: "took" }, segment.layers)))),
      h("p", { class: "line" }, key("route", "state-RUNNING", "on the route of a job that begins now"), key("ready", "state-SUCCEEDED", "ready"), key("loading", "state-DISPATCHED", "being read")),
    );
  }

  function nodeTable() {
    return section("Nodes", { key: "nodes", about: term("node") },
      table(
        [
          ["Node", (node) => h("b", { title: node.address }, node.node_id)],
          ["State", (node) => badge(node.state, "node")],
          ["Jobs", (node) => `${count(node.jobs)}${node.waiting ? `, ${count(node.waiting)} wait` : ""}`, { class: "number", about: "Jobs that it computes for, and that wait for room in its cache." }],
          ["Tokens/s", (node) => node.tokens_per_s.toFixed(1), { class: "number" }],
          ["Busy", (node) => meter(node.busy, 1, percent(node.busy))],
          ["Cache", (node) => meter(node.cache_used, node.cache_total, `${bytes(node.cache_used)} of ${bytes(node.cache_total)}`)],
          ["Weights", (node) => bytes(node.weights), { class: "number", about: "Memory that the weights of its layers take." }],
          ["Links", (node) => Object.entries(node.links).map(([other, ms]) => h("span", { class: "tag", key: other }, `${other} ${ms.toFixed(1)} ms`))],
        ],
        pipes.nodes, { key: (node) => node.node_id, label: "Nodes" }));
  }
}
