// Submit a job: a form made from the topic's schema.

import { get, part, pointed, post } from "../api.js";
import { h } from "../dom.js";
import { fieldView, fieldsOf, valueOf } from "../forms.js";
import { command, empty, explain, link, quoted, section } from "../parts.js";
import { term } from "../words.js";

export default async function submitPage(ctx) {
  const { topics } = await get("/v1/topics/schemas");
  const name = ctx.query.get("topic") ?? (topics.find((one) => !/^job\.(?:container|llm|chat|pipeline)\./.test(one.topic)) ?? topics[0])?.topic ?? "";
  const topic = topics.find((one) => one.topic === name);
  const fields = fieldsOf(topic?.input_schema);
  let given = {};
  let problem = "";
  let asJson = !fields;
  if (ctx.query.get("from")) {
    const job = await get(`/v1/jobs/${part(ctx.query.get("from"))}`);
    const payload = await pointed(job.request.context_ptr);
    try {
      given = JSON.parse(payload?.text ?? "{}");
    } catch {
      given = {};
    }
  }

  async function submit(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const options = form.elements;
    try {
      const found = asJson ? { input: JSON.parse(options.json.value.trim() || "{}") } : valueOf(fields, form);
      if (found.problem) throw new Error(found.problem);
      const body = { topic: name || options.topic.value, input: found.input, priority: options["option-priority"].value };
      if (options["option-delay"].value) body.delay = Number(options["option-delay"].value);
      if (options["option-key"].value) body.idempotency_key = options["option-key"].value;
      const labels = options["option-labels"].value.trim();
      if (labels) body.labels = Object.fromEntries(labels.split(/[\s,]+/).map((pair) => [pair.split("=")[0], pair.slice(pair.indexOf("=") + 1)]));
      const job = await post("/v1/jobs", body);
      ctx.go(`/dashboard/jobs/${part(job.job_id)}`);
    } catch (error) {
      problem = explain(error);
      ctx.update();
    }
  }

  return {
    title: "Submit",
    view: () => [
      h("h1", { tabindex: -1 }, "Submit a job"),
      topics.length ? null : empty("No worker announced a topic that your key may submit to. Start a worker, or submit by the command line."),
      topics.length
        ? section("Job", { key: "form" },
            h("label", { class: "field" }, h("span", { title: term("topic") }, "Topic"),
              h("select", { value: name, onchange: (event) => ctx.go(`/dashboard/submit?topic=${encodeURIComponent(event.target.value)}`) },
                topic || !name ? null : h("option", { value: name }, name), topics.map((one) => h("option", { value: one.topic }, one.topic)))),
            topic?.description ? h("p", null, topic.description) : null,
            topic?.paused ? h("p", { class: "problem" }, `Its jobs wait: ${topic.paused}`) : null,
            /^job\.(?:llm|chat)\./.test(name) ? h("p", null, link("/dashboard/chat", null, "Chat with this model"), " instead, to see the answer as it is made.") : null,
            h("form", { key: name, onsubmit: submit },
              fields ? h("label", { class: "check" }, h("input", { type: "checkbox", checked: asJson, onchange: (event) => { asJson = event.target.checked; ctx.update(); } }), "Write the input as JSON") : null,
              asJson
                ? h("label", { class: "field", key: "json" }, h("span", null, "Input (JSON object)"), h("textarea", { name: "json", spellcheck: "false", value: Object.keys(given).length ? JSON.stringify(given, null, 2) : "{}" }))
                : h("div", { key: "fields" }, fields.length ? fields.map((field) => fieldView(field, given[field.name])) : empty("It takes no input.")),
              h("details", { class: "options" }, h("summary", null, "Options"),
                h("div", { class: "columns" },
                  h("label", { class: "field" }, h("span", { title: term("priority") }, "Priority"), h("select", { name: "option-priority", value: "interactive" }, ["critical", "interactive", "batch"].map((one) => h("option", { value: one }, one)))),
                  h("label", { class: "field" }, h("span", null, "Delay (seconds)"), h("input", { name: "option-delay", type: "number", min: 0, step: "any" })),
                  h("label", { class: "field" }, h("span", null, "Labels (name=value, …)"), h("input", { name: "option-labels" })),
                  h("label", { class: "field" }, h("span", { title: "A submission with the same key, in the same tenant, is the same job." }, "Idempotency key"), h("input", { name: "option-key" })))),
              problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
              h("button", { class: "primary" }, "Submit")),
            command(`penstock submit ${quoted(name)} --input '{…}' --wait`))
        : null,
    ],
  };
}
