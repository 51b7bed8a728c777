// Pipelines: what can be started, and their runs as small multiples.

import { get, part, post } from "../api.js";
import { h } from "../dom.js";
import { fieldView, fieldsOf, valueOf } from "../forms.js";
import { ago, count, span } from "../format.js";
import { badge, empty, explain, jobLink, section, since, table } from "../parts.js";
import { stateOf, term } from "../words.js";

const SHOWN = 30;

export default async function pipelinesPage(ctx) {
  const { pipelines } = await get("/v1/pipelines");
  let runs;
  let problem = {};

  async function read() {
    runs = (await get("/v1/runs", { limit: 100 })).runs;
    ctx.update();
  }

  await read();
  let changed = false;
  ctx.resync = read;
  ctx.follow({ counts: () => (changed = true), note: () => (changed = true), progress: () => (changed = true) }, { topic: "job.pipeline.*" });
  ctx.every(1, () => {
    const happened = changed;
    changed = false;
    return happened && read();
  });

  return {
    title: "Pipelines",
    view: () => [
      h("h1", { tabindex: -1 }, "Pipelines"),
      pipelines.length ? null : empty("No pipeline is served. Workers announce them: penstock up --pipeline MODULE:PIPELINE"),
      pipelines.map(card),
      section("Runs", { key: "runs" },
        table(
          [
            ["Run", (run) => jobLink(run.job_id)],
            ["Pipeline", (run) => run.pipeline],
            ["Status", (run) => badge(run.status, "pipeline")],
            ["Stages", (run) => strip(run)],
            ["Items", (run) => items(run)],
            ["Trigger", (run) => run.trigger],
            ["Started", (run) => since(run.created_at)],
            ["Took", (run) => (run.started_at ? span((run.finished_at ?? Date.now() / 1000) - run.started_at) : ""), { class: "number" }],
          ],
          runs.slice(0, 50), { key: (run) => run.job_id, label: "Runs of pipelines", none: "No run yet." })),
    ],
  };

  /** The stages of a run, a square each. */
  function strip(run) {
    const stages = Object.values(run.stage_progress);
    return h("svg", { class: "strip", width: stages.length * 16, height: 14, role: "img", "aria-label": stages.map((stage) => `${stage.name} ${stage.status}`).join(", ") },
      stages.map((stage, index) => h("rect", { key: stage.name, class: `bar state-${stateOf(stage.status).like}`, x: index * 16, width: 13, height: 13, rx: 2, "fill-opacity": stage.status === "pending" || stage.status === "skipped" ? 0.25 : 1 }, h("title", null, `${stage.name}: ${stage.status}${stage.reason ? `, ${stage.reason}` : ""}`))));
  }

  function items(run) {
    const stages = Object.values(run.stage_progress);
    const failed = stages.reduce((sum, stage) => sum + stage.failed, 0);
    return `${count(stages.reduce((sum, stage) => sum + stage.ok, 0))} ok${failed ? `, ${count(failed)} failed` : ""}`;
  }

  function card(pipeline) {
    const fields = fieldsOf(pipeline.config_schema) ?? [];
    const own = runs.filter((run) => run.pipeline === pipeline.name).slice(0, SHOWN).reverse();
    const longest = Math.max(1e-3, ...own.map(took));
    return section(
      pipeline.name,
      { key: pipeline.name, about: term("pipeline") },
      pipeline.doc ? h("p", null, pipeline.doc) : null,
      h("ol", { class: "stages" }, pipeline.stages.map((stage) => h("li", { key: stage.name, title: stage.doc || null }, h("b", null, stage.name), h("span", { class: "soft" }, ` ${stage.kind}${stage.concurrency > 1 ? `, ${stage.concurrency} at once` : ""}`)))),
      own.length
        ? h("div", null, h("h3", { title: "A bar for each run, the newest on the right: how long it took, and how it ended. All have one scale." }, `Time of the last ${own.length === 1 ? "run" : `${own.length} runs`}, whole and by stage`),
            h("div", { class: "multiples" },
              history("whole run", own, longest, (run) => ({ seconds: took(run), status: run.status })),
              pipeline.stages.map(({ name }) => history(name, own, longest, (run) => ({ seconds: (run.stage_progress[name]?.duration_ms ?? 0) / 1000, status: run.stage_progress[name]?.status ?? "pending", items: run.stage_progress[name] })))))
        : empty("It has not run yet."),
      ctx.may("start_pipeline")
        ? h("details", null, h("summary", null, "Start a run"),
            h("form", { onsubmit: (event) => start(event, pipeline, fields) }, fields.map((field) => fieldView(field)), problem[pipeline.name] ? h("p", { class: "problem", role: "alert" }, problem[pipeline.name]) : null, h("button", { class: "primary" }, "Start")))
        : null,
    );
  }

  /** One of the small multiples: a bar for each run. */
  function history(name, own, longest, look) {
    const slots = Math.max(10, own.length);
    const step = 180 / slots;
    return h("figure", { key: name },
      h("figcaption", null, name),
      h("svg", { class: "history", viewBox: "0 0 180 36", width: 180, height: 36, role: "group", "aria-label": `Times of ${name}` },
        h("line", { class: "grid", x1: 0, x2: 180, y1: 35.5, y2: 35.5 }),
        own.map((run, index) => {
          const { seconds, status, items: stage } = look(run);
          const height = seconds ? Math.max(2, (seconds / longest) * 34) : 0;
          const told = `${stateOf(status).name}, ${span(seconds)}${stage ? `, ${count(stage.ok)} ok${stage.failed ? `, ${count(stage.failed)} failed` : ""}` : ""}`;
          const x = index * step;
          return h("a", { key: run.job_id, href: `/dashboard/jobs/${part(run.job_id)}`, "aria-label": `${name}: ${told}` },
            h("rect", { class: "hit", x, y: 0, width: step, height: 36 }, h("title", null, `${told}, ${ago(run.created_at)}`)),
            h("rect", { class: `bar state-${stateOf(status).like}`, x: x + step * 0.1, y: 35 - height, width: step * 0.8, height }));
        })));
  }

  async function start(event, pipeline, fields) {
    event.preventDefault();
    try {
      const found = valueOf(fields, event.currentTarget);
      if (found.problem) throw new Error(found.problem);
      const run = await post(`/v1/pipelines/${part(pipeline.name)}/runs`, { config: found.input });
      ctx.go(`/dashboard/jobs/${part(run.job_id)}`);
    } catch (error) {
      problem = { [pipeline.name]: explain(error) };
      ctx.update();
    }
  }
}

function took(run) {
  return run.started_at ? (run.finished_at ?? Date.now() / 1000) - run.started_at : 0;
}
