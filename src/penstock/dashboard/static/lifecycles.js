// A job's way through states: through those of every job, and through those of its own kind.

import { span } from "./format.js";
import { containerState, lifecycle } from "./words.js";

/** For `diagram`: steps are [{state, at, title}] in the order of time. */
function along(name, steps, current) {
  const visited = {};
  const travelled = new Set();
  let last = null;
  for (const { state, at, title } of steps) {
    if (state === last) continue;
    if (last) travelled.add(`${last}>${state}`);
    visited[state] = { note: last ? after(at - steps[0].at) : "accepted", title };
    last = state;
  }
  return { name, visited, travelled, current };
}

/** Some times are whole seconds. */
const after = (seconds) => (seconds ? `+${span(seconds)}` : "at once");
const moves = (history) => history.filter((entry) => entry.before !== entry.after);
const told = (entry) => `${entry.event} by ${entry.actor}${entry.reason ? `: ${entry.reason}` : ""}`;

/** Through the lifecycle that all jobs have. */
export function canonicalWay(job, history) {
  return along("canonical", moves(history).map((entry) => ({ state: entry.after, at: entry.at, title: told(entry) })), job.state);
}

/** Through the lifecycle of the job's own kind; null if it has none. */
export function ownWay(job, history, { run, batch, hops }) {
  if (run) return pipelineWay(run);
  if (batch) return batchWay(batch);
  if (job.request.topic.startsWith("job.container.")) return containerWay(job, history);
  if (job.request.topic.startsWith("job.chat.")) return processorWay(job, hops);
  return null;
}

function containerWay(job, history) {
  const steps = moves(history).map((entry) => ({ state: containerState(entry.after), at: entry.at, title: told(entry) }));
  return along("container", steps, containerState(job.state));
}

function pipelineWay(run) {
  const steps = [["PENDING", run.created_at], ["RUNNING", run.started_at], [run.status, run.finished_at]];
  return along("pipeline", steps.filter(([, at]) => at).map(([state, at]) => ({ state, at })), run.status);
}

function batchWay(batch) {
  const times = Object.keys(lifecycle("batch").states).map((state) => ({ state, at: state === "validating" ? batch.created_at : batch[`${state}_at`] }));
  return along("batch", times.filter(({ at }) => at).sort((a, b) => a.at - b.at), batch.status);
}

/** What the nodes of a split model did with it: by the hops of its result, or by its error code. */
function processorWay(job, hops) {
  const failure = lifecycle("processor").moves.find(([, event]) => event === job.result?.error_code?.toLowerCase());
  const layers = (hops ?? []).filter((hop) => hop.layers !== "ends");
  if (!failure && !layers.length) return null;
  const path = failure ? [failure] : passes(hops, layers);
  const time = (chosen, field) => `${span(chosen.reduce((sum, hop) => sum + hop[field], 0) / 1000)}`;
  const ends = (hops ?? []).filter((hop) => hop.layers === "ends");
  const notes = failure ? {} : {
    EMBED: { note: ends.length ? time(ends, "compute_ms") : "", title: "Together with HEAD." },
    HEAD: { note: ends.length ? time(ends, "compute_ms") : "", title: "Together with EMBED." },
    PROCESS_LAYERS: { note: time(layers, "compute_ms"), title: "On all nodes together." },
    SEND: { note: time(layers, "network_ms"), title: "On the way between nodes." },
  };
  const states = new Set(["VALIDATING", ...path.flatMap(([before, , after]) => [before, after])]);
  const visited = Object.fromEntries([...states].map((state) => [state, notes[state] ?? {}]));
  return { name: "processor", visited, travelled: new Set(path.map(([before, , after]) => `${before}>${after}`)), current: "DONE" };
}

/** The moves that a route needs: on the origin for embedding and head, and on each node for its layers. */
function passes(hops, layers) {
  const origin = hops.find((hop) => hop.layers === "ends")?.node ?? layers[0].node;
  const crosses = layers.some((hop, index) => hop.node !== (index ? layers[index - 1].node : origin)) || layers.at(-1).node !== origin;
  const events = new Set(["more_prefill_chunks", "prefill_complete", "job_completed"]);
  if (Math.max(...hops.map((hop) => hop.passes)) > 1) events.add("more_tokens_local");
  if (crosses) events.add("needs_layers").add("handoff_complete");
  const wanted = ([before, event]) =>
    events.has(event) ||
    (event === "layers_complete" && layers.at(-1).node === origin) ||
    (event === "next_layer_local" && before === "EMBED" && layers[0].node === origin) ||
    (event === "next_layer_remote" && (before === "EMBED" ? layers[0].node !== origin : crosses));
  return lifecycle("processor").moves.filter(wanted);
}
