// What states and terms mean: the engine's own tables, and sentences of the glossary.

import { get } from "./api.js";

let words = { lifecycles: {}, container: {}, like: {}, actors: {} };

export async function loadWords() {
  words = await get("/dashboard/static/vocabulary.json");
}

/** A state of anything: {name, meaning, final, like}; `like` is the job state with its colour. It is of a lifecycle, or of a thing in STATUSES. */
export function stateOf(state, lifecycle = "canonical") {
  const name = String(state).toUpperCase().replaceAll(" ", "_");
  const states = words.lifecycles[lifecycle]?.states ?? {};
  const known = states[name] ?? states[state] ?? { meaning: STATUSES[lifecycle]?.[name] };
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

/** The state of a container job, by that of the canonical job. */
export function containerState(state) {
  return words.container[state];
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
  age: "the time since a job was accepted.",
  alert: "a threshold that a finished pipeline run exceeded.",
  approval: "a person's consent to run a job that a rule holds. It is bound to the request and to the rules.",
  artifact: "a named file that a job produced, kept with its result.",
  attempt: "one dispatch of a job to one worker, numbered from 1. Not a retry.",
  "audit log": "a record of administrative actions and refusals: who did what, and when.",
  breaker: "a circuit breaker: it stops calls to a service that keeps failing. Closed, open or half open; shared by all runs.",
  busy: "of a node: the share of the time in which it computes.",
  capability: "what a job is going to do, as a word that safety rules can match.",
  capacity: "the maximum number of jobs that a pool holds at once.",
  constraint: "a limit that a safety rule sets for a job (memory, network, output); it is passed on with the job.",
  cron: "five fields that say when: minute, hour, day, month, weekday; or a word such as @hourly.",
  "dead letter": "a job that ended FAILED or TIMEOUT and was not retried.",
  deadline: "the time by which a job must have ended.",
  drain: "to accept no new work and finish what is running; of a pool: to pause it and wait until it is idle.",
  "error code": "why a try did not succeed, as one word: the class of an exception, or a code of the engine.",
  event: "of a lifecycle: what causes a transition. Of a stream: one transition, with its cursor.",
  "exit code": "the number with which a container's process ended; 0 is success.",
  "failed item": "an item whose call raised, or could not be made.",
  final: "a terminal state: no transition leaves it.",
  fired: "of a schedule: how many jobs it has submitted.",
  held: "with a worker: DISPATCHED or RUNNING.",
  "idempotency key": "a submission with the same key, in the same tenant, is the same job.",
  idempotent: "safe to run again.",
  image: "the files that a container starts with, by name.",
  item: "one call of a map stage, with its input, outcome and output.",
  job: "one piece of work, with a request, a state, a log and, in the end, a result.",
  "kv cache": "what a model remembers of the tokens so far, in memory; it grows with the context.",
  label: "a name and a value on a job, a worker or a pool.",
  limit: "the maximum number of jobs that run at once, start in a period, or wait, by key.",
  load: "the jobs that are held, and how many fit.",
  log: "a job's transitions, append-only. Log lines are what a job wrote.",
  model: "a language model in a file (GGUF), served under the topic job.llm.NAME, or under job.chat.NAME when its layers are split over nodes.",
  node: "a process that holds layers of a split model, or its end model.",
  p50: "half of the jobs waited no longer than this.",
  p99: "99 of 100 jobs waited no longer than this.",
  parameters: "the numbers that a model has learned; a measure of its size.",
  parent: "a job that another one waits for (after), or that submitted it.",
  pause: "to stop dispatching to a pool, or firing a schedule.",
  "peak memory": "the most memory that a container has used so far.",
  pipe: "a model's layers over the nodes that hold them; complete when a route covers every layer. Not a pipeline.",
  pipeline: "a sequence of stages that runs as one job.",
  pool: "a named group of workers (elsewhere: a task queue).",
  principal: "the name of a caller: that of its key, or owner.",
  priority: "critical, interactive or batch: the head start that a job has in the queue.",
  "processor time": "how long a container has kept processors busy so far.",
  rate: "a number of jobs per period, as a sliding window: no window of that length ever admits more.",
  result: "how a job ended (JobResult), and the value that it returned.",
  retry: "a new job that repeats a failed one and is linked to it. Not an attempt.",
  role: "of the engine: gateway, scheduler, worker or reconciler, each with its legal transitions. Of a key: submit, operate, approve or admin.",
  route: "the hops that together cover every layer of a split model.",
  rule: "one entry of the safety rule file.",
  run: "one job of a pipeline. Its record is derived from the job and its rows.",
  "run time": "how long a job ran: from its start to its end, or until now.",
  schedule: "a cron expression, a time zone, and the job to submit.",
  segment: "contiguous layers of a model that a node holds.",
  silence: "the time since the last message of a worker.",
  slot: "room for one running job in a worker.",
  snapshot: "the short hash that identifies a set of rules.",
  spool: "a folder that is a queue: the path of a job's directory is its state.",
  stage: "one function of a pipeline: a map, called once per item, or a step, called once.",
  state: "where a job is in its lifecycle.",
  "success rate": "the share of SUCCEEDED among the jobs that ended.",
  tenant: "whom a job belongs to; tenants do not see each other (elsewhere: a namespace).",
  throughput: "the jobs that ended, per minute.",
  "time left": "how long the rest of a stage will take at its present rate.",
  "time to first token": "how long a model reads a prompt until its answer begins; the median of the last 20 answers.",
  timeout: "how long one attempt may run. TIMEOUT is also the state of a job that exceeded it.",
  "tokens per second": "tokens that a model generates, or a node computes, in a second.",
  topic: "the kind of work that a job is; it selects the workers that can run it.",
  trigger: "what started a run: a person, a schedule, or a retry.",
  try: "a job, or one of its retries; in counts they are one job, in the state of the newest.",
  unfinished: "in a state that is not final: PENDING, SCHEDULED, DISPATCHED or RUNNING.",
  verdict: "the safety kernel's decision about a job: decision, rule, snapshot and constraints.",
  waiting: "not with a worker yet: PENDING or SCHEDULED.",
  "wall time": "from the start of a run to its end.",
  worker: "takes jobs and runs them, inside the engine's process or in its own.",
  workflow: "jobs with the same workflow_id, in the order of their steps.",
  workspace: "the folder of a spool.",
};

/** The same for states of things that have no lifecycle of their own. */
export const STATUSES = {
  worker: { READY: "connected; it takes jobs.", DRAINING: "takes no new job, finishes what it runs, and leaves.", MISSING: "has not been heard from; when its lease ends, its jobs go to others or end." },
  pool: { READY: "its jobs are dispatched.", PAUSED: "nothing is dispatched to it: its jobs wait." },
  schedule: { ACTIVE: "fires at its times.", PAUSED: "does not fire until it is resumed.", FAILED: "its last firing was refused or skipped." },
  key: { ACTIVE: "can be used.", EXPIRED: "its time is over: it is refused.", REVOKED: "was taken back: it is refused." },
  audit: { DONE: "it was allowed, and done.", REFUSED: "it was not allowed, and not done." },
  breaker: { CLOSED: "calls go through.", OPEN: "calls are not made: the service kept failing.", HALF_OPEN: "one call is tried; it closes the breaker or opens it again." },
  model: { READY: "in memory; it answers.", LOADING: "its weights are being read.", ILL: "its engine can't run; its jobs wait.", GONE: "not in memory; the next job loads it." },
  node: { READY: "computes its layers for jobs.", LOADING: "reads the weights of its layers.", IDLE: "holds no layers.", DRAINING: "takes no new job, and leaves.", STALLED: "a computation takes far longer than it should." },
  pipe: { COMPLETE: "nodes hold every layer: its jobs can begin.", INCOMPLETE: "layers are missing: its jobs wait." },
  workspace: { READY: "a server takes its jobs.", IDLE: "no server takes its jobs: they wait." },
  rule: { OK: "every condition of the rule matches the job.", SKIPPED: "a condition of the rule does not match the job." },
  stage: { PENDING: "its turn has not come.", RUNNING: "its items are being processed.", COMPLETED: "finished without errors.", PARTIAL: "finished with some errors.", FAILED: "it raised, or nothing in it succeeded.", SKIPPED: "it was not run." },
};

// What happened, by error code: docs/reference/error-codes.md, containers.md, how-to/language-models.md.
export const REASONS = {
  APPROVAL_EXPIRED: "the time limit for approvals passed",
  APPROVAL_REJECTED: "an approver rejected it; the message has the reason",
  BAD_INPUT: "the input does not fit the function's signature",
  BAD_RUNTIME_MODE: "the mode is neither image nor build",
  BUILD_FAILED: "the build failed or took too long; the message has the end of its log",
  CANCELLED: "it was cancelled; the message says why",
  COMMAND_NOT_FOUND: "the image has no such command",
  COMMAND_NOT_RUNNABLE: "it has, but it can't be executed",
  CONSTRAINT_NOT_ENFORCED: "a safety rule allowed it within constraints that can't be enforced where it was to run, so it was not run",
  CONTEXT_EXCEEDED: "the prompt has more tokens than the context; the message names both counts",
  DEADLINE_EXCEEDED: "its deadline passed while it waited, or its worker did not end it in time",
  DENIED: "a safety rule refused it; the message names the rule",
  DISK_LOW: "its disk is nearly full",
  DRAINING: "the worker takes no new jobs",
  END_MODEL_UNAVAILABLE: "the job came to its head on a node that can't compute it",
  ENGINE_CRASHED: "llama.cpp died three times under the job, the last time while it ran alone",
  ENGINE_ERROR: "the engine refused; the message has its words",
  ENGINE_MISSING: "llama.cpp is not installed, or can't be loaded; the message says how to get it",
  ENGINE_UNAVAILABLE: "the engine went away, or answers nonsense",
  EXECUTOR_ERROR: "the executor itself failed, not the job's code",
  EXITED: "the job called sys.exit, or its process ended by itself",
  IDEMPOTENCY_KEY_REUSED: "the Idempotency-Key came before, with another job",
  IMAGE_NOT_ALLOWED: "the image is not on the worker's list. Also an end: the name means another image than the list pins",
  IMAGE_NOT_FOUND: "neither the engine nor the registry has it, or nothing is fetched here (pull: never)",
  IMAGE_PULL_FAILED: "it could not be fetched",
  INPUT_UNAVAILABLE: "the submitter may not read an input's pointer, or nothing is there",
  INVALID_BODY: "there is no body, or it is not a JSON object, or could be read in two ways (a name twice, NaN, nested too deep); 413 when it is too large",
  INVALID_FIELD: "error.field can't be what it is",
  INVALID_IMAGE: "the image's name is invalid, for example because it begins with a dash",
  INVALID_JOB_ID: "it has control characters, or more than 200 characters",
  INVALID_PROMPT: "the model can't take this prompt",
  INVALID_SCHEMA: "an invalid JSON schema or grammar",
  JOB_ID_ALREADY_EXISTS: "there is, or was, a job with this id",
  JOB_MISSING: "a node was restarted or gave up its layers while the job was under way",
  JOB_UPDATE_FAILED: "the client disconnected",
  KILLED: "the job's process was killed by a signal that Penstock did not send",
  MISSING_IMAGE: "the image is absent, empty or no text",
  MISSING_JOB_ID: "it is absent, empty or no text",
  MISSING_RUNTIME: "runtime is absent or no object",
  MODEL_INVALID: "the model's file is missing, truncated, damaged, or not a GGUF file",
  MODEL_NOT_FOUND: "there is no model of the name that a spooled job has",
  NODE_LOST: "a node was lost or fell silent, and no other has its layers",
  NODE_STALLED: "a node was lost or fell silent, and no other has its layers",
  NON_ZERO_EXIT: "it ended by itself with another code than 0, or something in it was killed",
  NOT_ALLOWED: "this worker does not grant error.field, or not so much of it",
  NOT_IMPORTABLE: "a new process could not import the function (process mode)",
  NOT_STARTED: "the worker held it for longer than the dispatch timeout",
  NOT_SUPPORTED: "the model can't: tools that its template does not know, images without a projector",
  NO_ENGINE: "a pipeline was run by a worker that has no engine behind it",
  NO_LOCAL_MODEL: "a node was restarted or gave up its layers while the job was under way",
  NO_MODEL_FOR_NEXT_LAYER: "a node was restarted or gave up its layers while the job was under way",
  NO_PROCESS: "no process could be started for it",
  NO_ROOM: "the nodes' caches stayed full, or too many jobs waited, for as long as a job may wait",
  OOM_KILLED: "it used more memory than it may",
  ORIGIN_MISMATCH: "the job came to its head on a node that can't compute it",
  OUTPUT_LIMIT: "the result is larger than a safety rule's max_output, and was not stored",
  OUT_OF_MEMORY: "it raised MemoryError, or passed its memory_limit or a safety rule's max_memory",
  PARENT_ENDED: "the job that it is a child of ended without success before it had begun",
  PARENT_FAILED: "a job that it was to run after did not succeed",
  PARTIAL: "a pipeline ended PARTIAL: some of its work failed; the result says what",
  PIPELINE_FAILED: "a pipeline ended FAILED; the message has its first errors",
  PIPE_UNAVAILABLE: "the nodes that are there do not hold all layers, or not the same weights; the message names what is missing",
  PREFILL_UPDATE_FAILED: "the client disconnected",
  QUEUE_FULL: "too many jobs wait; Retry-After says when to come again",
  RESULT_NOT_STORABLE: "what it returned can't be written as JSON, or the database can't hold its result or error",
  RESULT_TOO_LARGE: "the result is larger than limits.max_result",
  RESULT_WRONG_TYPE: "what it returned is not what its return annotation says",
  RETRY: "it raised penstock.Retry",
  RUNTIME_ERROR: "something in the worker itself went wrong",
  RUNTIME_NOT_SUPPORTED: "build, on a worker that does not build",
  TIMEOUT: "it ran for longer than its timeout, or past its deadline",
  TOO_LARGE: "its input is larger than a worker may read",
  UNKNOWN_TOPIC: "the worker that was given it has no function for it",
  UNREADABLE_POINTER: "its input could not be read",
  UNSUPPORTED_PROTOCOL_VERSION: "protocol_version is not the number 1",
  WORKER_LOST: "its worker vanished while it ran, and it is not marked idempotent",
  WORKER_RESTARTED: "the worker was restarted while it ran, and its container was gone, or was ended as configured (on_restart: end)",
  WORKER_STOPPED: "its worker was stopped, it did not end in the time to drain, and it is not idempotent",
  WRONG_COMPUTATION: "a node returned a wrong result: not a number, another shape, or other positions than were sent",
};

/** Headings of tables and names of facts, by the term that explains them. */
const HEADINGS = {
  Age: "age", Alerts: "alert", Approvals: "approval", Attempt: "attempt", Attempts: "attempt", Breaker: "breaker", Busy: "busy", Cache: "kv cache",
  Capability: "capability", Constraints: "constraint", Cpu: "processor time", CPU: "processor time", Cron: "cron", Deadline: "deadline", Decision: "verdict",
  Error: "error code", Event: "event", Exit: "exit code", Failed: "failed item", Fired: "fired", Heard: "silence", Idempotent: "idempotent",
  "Idempotency key": "idempotency key", Image: "image", Item: "item", Items: "item", Job: "job", Labels: "label", Layers: "segment", Left: "time left",
  Limit: "limit", Load: "load", Memory: "peak memory", Model: "model", Node: "node", Parameters: "parameters", Parent: "parent", Pipeline: "pipeline",
  Pool: "pool", Priority: "priority", Rate: "rate", Retries: "retry", Roles: "role", Rule: "rule", Run: "run", Running: "held", Schedule: "schedule",
  Snapshot: "snapshot", Stage: "stage", Stages: "stage", State: "state", Status: "state", "Submitted by": "principal", Tenant: "tenant", Timeout: "timeout",
  "Tokens/s": "tokens per second", Took: "run time", Topic: "topic", Topics: "topic", Tries: "try", Trigger: "trigger", Waiting: "waiting",
  "Wall time": "wall time", Who: "principal", Worker: "worker", Workers: "worker", Workflow: "workflow", Workspace: "workspace",
};

export function about(heading) {
  return HEADINGS[heading] && term(HEADINGS[heading]);
}

/** What an error code means. */
export function reason(code) {
  return REASONS[code] ? `${code}: ${REASONS[code]}.` : term("error code");
}

export function term(name) {
  return `${name}: ${TERMS[name]}`;
}
