// Which page is at which path, and the navigation. A page is shown to those who may use it.

import approvals from "./pages/approvals.js";
import audit from "./pages/audit.js";
import chat from "./pages/chat.js";
import containers from "./pages/containers.js";
import job from "./pages/job.js";
import jobs from "./pages/jobs.js";
import keys from "./pages/keys.js";
import models from "./pages/models.js";
import overview from "./pages/overview.js";
import pipelines from "./pages/pipelines.js";
import policy from "./pages/policy.js";
import schedules from "./pages/schedules.js";
import spools from "./pages/spools.js";
import submit from "./pages/submit.js";
import workers from "./pages/workers.js";

/** `needs` is the operation of the API without which the page is of no use. */
export const SECTIONS = [
  [
    "",
    [
      { path: "", title: "Overview", page: overview },
      { path: "jobs", title: "Jobs", page: jobs },
      { path: "approvals", title: "Approvals", page: approvals, badge: (status) => status.awaiting_approval },
      { path: "pipelines", title: "Pipelines", page: pipelines },
      { path: "schedules", title: "Schedules", page: schedules },
      { path: "submit", title: "Submit", page: submit, needs: "submit_job" },
      { path: "chat", title: "Chat", page: chat, needs: "create_chat_completion" },
    ],
  ],
  [
    "Machines",
    [
      { path: "workers", title: "Workers", page: workers, needs: "list_workers", badge: (status) => status.paused_pools.length },
      { path: "models", title: "Models", page: models, badge: (status) => Object.keys(status.paused_topics).length },
      { path: "containers", title: "Containers", page: containers },
      { path: "spools", title: "Spools", page: spools, needs: "get_spools" },
    ],
  ],
  [
    "Rules",
    [
      { path: "policy", title: "Policy", page: policy, needs: "get_policy", badge: (status) => (status.policy_problem ? 1 : 0) },
      { path: "keys", title: "Keys", page: keys, needs: "list_keys" },
      { path: "audit", title: "Audit", page: audit, needs: "read_audit" },
    ],
  ],
];

export const ROUTES = [
  [/^jobs\/([^/]+)$/, job],
  ...SECTIONS.flatMap(([, entries]) => entries.map(({ path, page }) => [new RegExp(`^${path}$`), page])),
];
