// Workspaces of spool servers: how many jobs lie in each folder.

import { get } from "../api.js";
import { diagram } from "../charts.js";
import { h } from "../dom.js";
import { count, plural } from "../format.js";
import { badge, copyable, section, table } from "../parts.js";
import { term } from "../words.js";

const FOLDERS = [
  ["QUEUED", "input/ready", "Complete, and waiting for a server."],
  ["RUNNING", "processing", "Claimed by a server."],
  ["DONE", "output", "Ended with a result."],
  ["FAILED", "failed", "Ended with an error."],
];

export default async function spools(ctx) {
  let list;

  async function read() {
    ({ spools: list } = await get("/v1/spools"));
    ctx.update();
  }

  await read();
  ctx.resync = read;
  ctx.every(3, read);

  return {
    title: "Spools",
    view: () => [
      h("h1", { tabindex: -1 }, "Spools"),
      section("Workspaces", { key: "spools", about: term("spool") },
        table(
          [
            ["Workspace", (spool) => h("code", null, spool.path)],
            ["Server", (spool) => (spool.problem ? h("span", { class: "problem" }, spool.problem) : badge(spool.served ? "READY" : "IDLE", "workspace"))],
            ...FOLDERS.map(([state, folder, about]) => [folder, (spool) => count(spool.counts[state] ?? 0), { class: "number", about }]),
          ],
          list, { key: (spool) => spool.path, label: "Workspaces of spool servers", none: ["None is named here. Name them in the settings of the engine: ", copyable('spools = ["/path/of/a/workspace"]')] })),
      list.filter((spool) => !spool.problem).map((spool) => section(spool.path, { key: spool.path, about: "Where its jobs are on the lifecycle of a spooled job: a state is a folder." }, lifecycle(spool))),
    ],
  };
}

function lifecycle(spool) {
  const counts = FOLDERS.filter(([state]) => spool.counts[state]);
  const visited = Object.fromEntries(counts.map(([state, folder]) => [state, { note: plural(spool.counts[state], "job"), title: folder }]));
  const label = `The states of a spooled job, with the jobs in each: ${counts.map(([state]) => `${state} ${spool.counts[state]}`).join(", ") || "none"}`;
  return diagram("spool", { visited, label });
}
