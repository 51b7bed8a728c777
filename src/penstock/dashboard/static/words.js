// What states and terms mean: the engine's own tables, and sentences of the glossary.

import { get } from "./api.js";

let words = { lifecycles: {}, like: {}, actors: {} };

export async function loadWords() {
  words = await get("/dashboard/static/vocabulary.json");
}

/** A state of anything: {name, meaning, final, like}; `like` is the job state with its colour. */
export function stateOf(state, lifecycle = "canonical") {
  const name = String(state).toUpperCase().replaceAll(" ", "_");
  const states = words.lifecycles[lifecycle]?.states ?? {};
  const known = states[name] ?? states[state] ?? {};
  const canonical = words.lifecycles.canonical?.states ?? {};
  return {
    name,
    meaning: known.meaning ?? "",
    final: known.final ?? false,
    like: name in canonical ? name : words.like[name] ?? "PENDING",
  };
}

export function lifecycle(name) {
  return words.lifecycles[name];
}

/** Whether an event may happen to a job in this state. */
export function isLegal(state, event, name = "canonical") {
  return words.lifecycles[name].moves.some(([before, how]) => before === state && how === event);
}

export const STATES = ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING", "SUCCEEDED", "FAILED", "TIMEOUT", "CANCELLED", "DENIED"];
export const UNFINISHED = STATES.slice(0, 4);
export const ENDS = STATES.slice(4);

// Sentences of docs/glossary.md, for hovering; tests/browser compares them with that page.
export const TERMS = {
  approval: "a person's consent to run a job that a rule holds. It is bound to the request and to the rules.",
  artifact: "a named file that a job produced, kept with its result.",
  attempt: "one dispatch of a job to one worker, numbered from 1. Not a retry.",
  "audit log": "a record of administrative actions and refusals: who did what, and when.",
  capacity: "the maximum number of jobs that a pool holds at once.",
  "dead letter": "a job that ended FAILED or TIMEOUT and was not retried.",
  drain: "to accept no new work and finish what is running; of a pool: to pause it and wait until it is idle.",
  held: "with a worker: DISPATCHED or RUNNING.",
  limit: "the maximum number of jobs that run at once, start in a period, or wait, by key.",
  pause: "to stop dispatching to a pool, or firing a schedule.",
  pipeline: "a sequence of stages that runs as one job.",
  pool: "a named group of workers (elsewhere: a task queue).",
  principal: "the name of a caller: that of its key, or owner.",
  priority: "critical, interactive or batch: the head start that a job has in the queue.",
  retry: "a new job that repeats a failed one and is linked to it. Not an attempt.",
  rule: "one entry of the safety rule file.",
  schedule: "a cron expression, a time zone, and the job to submit.",
  slot: "room for one running job in a worker.",
  snapshot: "the short hash that identifies a set of rules.",
  tenant: "whom a job belongs to; tenants do not see each other (elsewhere: a namespace).",
  topic: "the kind of work that a job is; it selects the workers that can run it.",
  verdict: "the safety kernel's decision about a job: decision, rule, snapshot and constraints.",
  waiting: "not with a worker yet: PENDING or SCHEDULED.",
  worker: "takes jobs and runs them, inside the engine's process or in its own.",
  workflow: "jobs with the same workflow_id, in the order of their steps.",
};

export function term(name) {
  return `${name}: ${TERMS[name]}`;
}
