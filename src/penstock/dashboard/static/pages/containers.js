// Jobs that run in containers, with what each has used.

import { get, getOr, part, pointed } from "../api.js";
import { h } from "../dom.js";
import { bytes, span } from "../format.js";
import { badge, copyable, errorCode, jobLink, link, runTime, section, since, table } from "../parts.js";

const TOPIC = "job.container*";
const HEAD = 4096;

/** A container job's image and, once it has ended, its exit code and what it used; before, what its worker says. */
export async function containerOf(job, ctx) {
  const [image, end, worker] = await Promise.all([
    imageOf(job),
    endOf(job),
    !job.finished_at && job.worker_id && ctx.may("get_worker") ? getOr(null, `/v1/workers/${part(job.worker_id)}`) : null,
  ]);
  return { image, usage: worker?.facts?.usage?.[job.job_id], ...end };
}

/** What the result says before the output; also a job that failed has one. */
async function endOf(job) {
  if (!job.result?.result_ptr) return {};
  try {
    const { text, cut } = await pointed(job.result.result_ptr, HEAD);
    return JSON.parse(cut ? `${text.slice(0, text.indexOf(',"stdout":'))}}` : text);
  } catch {
    return {}; // its retention has passed
  }
}

async function imageOf(job) {
  try {
    return JSON.parse((await pointed(job.request.context_ptr)).text).runtime.image ?? "";
  } catch {
    return "";
  }
}

export default async function containers(ctx) {
  let jobs, why;
  let workers = [];
  const ends = new Map();
  const images = new Map();

  async function read() {
    ({ jobs, why = {} } = await get("/v1/jobs", { topic: TOPIC, limit: 50, why: true }));
    await Promise.all(jobs.filter((job) => !images.has(job.job_id)).map(async (job) => images.set(job.job_id, await imageOf(job))));
    await Promise.all(jobs.filter((job) => job.finished_at && !ends.has(job.job_id)).map(async (job) => ends.set(job.job_id, await endOf(job))));
    ctx.update();
  }

  /** Workers say every few seconds what their containers have used. */
  async function readWorkers() {
    if (!ctx.may("list_workers")) return;
    workers = (await get("/v1/workers")).workers.filter((worker) => worker.topics.some((topic) => topic.startsWith("job.container")));
    ctx.update();
  }

  const used = (job) => ends.get(job.job_id)?.usage ?? workers.map((worker) => worker.facts?.usage?.[job.job_id]).find(Boolean) ?? {};

  await Promise.all([read(), readWorkers()]);
  let changed = false;
  ctx.resync = () => Promise.all([read(), readWorkers()]);
  ctx.every(5, () => jobs.some((job) => !job.finished_at) && readWorkers());
  ctx.follow({ job: () => (changed = true) }, { topic: TOPIC });
  ctx.every(1, () => {
    ctx.update();
    const happened = changed;
    changed = false;
    return happened && read();
  });

  return {
    title: "Containers",
    view: () => [
      h("h1", { tabindex: -1 }, "Containers"),
      section("Container jobs", { key: "jobs", aside: link(`/dashboard/jobs?topic=${encodeURIComponent(TOPIC)}`, null, "All") },
        table(
          [
            ["State", (job) => badge(job.state)],
            ["Job", (job) => jobLink(job.job_id)],
            ["Image", (job) => h("code", null, images.get(job.job_id))],
            ["Age", (job) => since(job.accepted_at), { class: "number" }],
            ["Took", (job) => runTime(job), { class: "number" }],
            ["Exit", (job) => ends.get(job.job_id)?.exit_code ?? "", { class: "number" }],
            ["Memory", (job) => (used(job).peak_memory_bytes ? bytes(used(job).peak_memory_bytes) : ""), { class: "number" }],
            ["CPU", (job) => (used(job).cpu_seconds != null ? span(used(job).cpu_seconds) : ""), { class: "number" }],
            ["Why", (job) => (job.finished_at ? ending(job.result) : (why[job.job_id] ?? "")), { class: "why" }],
          ],
          jobs, { key: (job) => job.job_id, label: "Container jobs", none: ["No container job yet. Run one: ", copyable("penstock container run IMAGE COMMAND")] })),
      ctx.may("list_workers") ? section("Workers that run containers", { key: "workers" },
        table([["Worker", (worker) => worker.worker_id], ["State", (worker) => badge(worker.status, "worker")], ["Running", (worker) => `${worker.held} of ${worker.slots}`, { class: "number" }], ["Where", (worker) => worker.host]],
          workers, { key: (worker) => worker.worker_id, label: "Workers that run containers", none: ["None. Start an engine with containers: ", copyable("penstock up --containers auto")] })) : null,
    ],
  };
}

function ending(result) {
  return result?.error_code ? h("div", { class: "clamp" }, errorCode(result.error_code), ` ${result.error_message ?? ""}`) : "";
}
