// A run of a pipeline: its stages with their items.

import { get, part, post } from "../api.js";
import { h } from "../dom.js";
import { count, plural, span } from "../format.js";
import { action, badge, errorCode, facts, notify, table } from "../parts.js";

/** The stages of a run, failed items, summary and alerts; part of its job's page. */
export function stages(ctx, run) {
  const list = Object.values(run.stage_progress);
  const failed = list.some((stage) => stage.failed);
  return [
    table(
      [
        ["Stage", (stage) => h("span", null, stage.name, stage.critical ? h("span", { class: "tag" }, "critical") : null)],
        ["Status", (stage) => h("span", { title: stage.reason || null }, badge(stage.status, "stage"))],
        ["Items", (stage) => items(stage)],
        ["Failed", (stage) => (stage.failed ? h("button", { class: "quiet bad", type: "button", onclick: () => showItems(ctx, run, stage) }, plural(stage.failed, "item")) : ""), { class: "number" }],
        ["Left", (stage) => (stage.eta === null ? "" : span(stage.eta)), { class: "number" }],
        ["Took", (stage) => (stage.started_at ? span(stage.duration_ms / 1000) : ""), { class: "number" }],
      ],
      list,
      { key: (stage) => stage.name, label: "Stages" },
    ),
    ctx.failedItems?.[run.job_id] ? failedItems(ctx.failedItems[run.job_id]) : null,
    run.alerts.length ? h("ul", { class: "alerts" }, run.alerts.map((alert) => h("li", { key: alert.code }, h("b", null, alert.code), `: ${alert.message}`))) : null,
    run.summary ? facts([["Wall time", span(run.summary.duration_ms / 1000)], ["In stages", span(run.summary.stages_ms / 1000), "The times of its stages, added up."], ["Trigger", run.summary.trigger], ["Trace", run.trace_id, "The id by which traces of the run are found (OpenTelemetry)."]]) : null,
    run.finished_at && failed && ctx.may("retry_failed")
      ? action("Retry failed items", async () => {
          const again = await post(`/v1/runs/${part(run.job_id)}/retry-failed`);
          notify("A new run takes the failed items.");
          ctx.go(`/dashboard/jobs/${part(again.job_id)}`);
        }, { class: "primary" })
      : null,
  ];
}

function items(stage) {
  const total = stage.total || 1;
  const share = (n) => `${(n / total) * 100}%`;
  return h(
    "span",
    { class: "meter items" },
    h("svg", { "aria-hidden": "true" },
      h("rect", { class: "rail", width: "100%", height: "100%" }),
      h("rect", { class: "bar state-SUCCEEDED", width: share(stage.ok), height: "100%" }),
      h("rect", { class: "bar state-FAILED", x: share(stage.ok), width: share(stage.failed), height: "100%" }),
      h("rect", { class: "bar state-PENDING", x: share(stage.ok + stage.failed), width: share(stage.skipped), height: "100%" })),
    h("span", null, !stage.total && stage.status === "skipped" ? "none" : `${count(stage.done)} of ${stage.listed ? count(stage.total) : `${count(stage.total)}+`}`),
  );
}

async function showItems(ctx, run, stage) {
  const { items: found } = await get(`/v1/runs/${part(run.job_id)}/stages/${part(stage.name)}/items`, { outcome: ["failed"], limit: 100 });
  ctx.failedItems = { [run.job_id]: { stage, found } };
  ctx.update();
}

function failedItems({ stage, found }) {
  return h("div", { class: "failed-items" },
    h("h3", null, `Failed items of ${stage.name}`),
    table(
      [
        ["Item", (item) => h("code", null, item.key)],
        ["Error", (item) => h("span", { class: "message" }, errorCode(item.error_code), item.error_code ? " " : "", item.error)],
        ["Kind", (item) => item.error_class ?? ""],
        ["Attempts", (item) => item.attempts ?? "", { class: "number" }],
      ],
      found, { key: (item) => item.seq, label: "Failed items" }));
}
