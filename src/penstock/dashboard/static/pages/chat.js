// A chat with a model that is served here. Each answer is a job; it can be stopped.

import { csrfToken, failure, get } from "../api.js";
import { h } from "../dom.js";
import { span } from "../format.js";
import { empty, explain, link, section } from "../parts.js";

export default async function chat(ctx) {
  const { data: models } = await get("/v1/models");
  let model = ctx.query.get("model") ?? models[0]?.id ?? "";
  const turns = []; // {role, content, note}
  let running = null;

  async function say(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const text = form.elements.text.value.trim();
    if (!text || running) return;
    form.reset();
    turns.push({ role: "user", content: text });
    await answer();
  }

  async function answer() {
    const turn = { role: "assistant", content: "", note: "thinking …" };
    const messages = turns.filter((one) => one.content).map(({ role, content }) => ({ role, content }));
    turns.push(turn);
    const controller = (running = new AbortController());
    const began = performance.now();
    let first = null;
    let pieces = 0;
    ctx.update();
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-CSRF-Token": csrfToken() },
        body: JSON.stringify({ model, messages, stream: true, max_tokens: 1024 }),
        signal: controller.signal,
      });
      if (!response.ok) throw await failure(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const frames = (rest + value).split("\n\n");
        rest = frames.pop();
        for (const frame of frames) {
          const data = frame.replace(/^data: /, "");
          if (!frame.startsWith("data: ") || data === "[DONE]") continue;
          const told = JSON.parse(data);
          if (told.error) throw new Error(told.error.message);
          const piece = told.choices?.[0]?.delta?.content;
          if (!piece) continue;
          first ??= performance.now() - began;
          pieces += 1;
          turn.content += piece;
          turn.note = "";
          ctx.update();
        }
      }
      const seconds = (performance.now() - began) / 1000;
      turn.note = first === null ? "no answer" : `first token after ${span(first / 1000)}, ${(pieces / Math.max(0.001, seconds - first / 1000)).toFixed(1)} tokens/s`;
    } catch (error) {
      turn.note = controller.signal.aborted ? "stopped" : explain(error);
    } finally {
      running = null;
      ctx.update();
    }
  }

  return {
    title: "Chat",
    key: "chat",
    view: () => [
      h("h1", { tabindex: -1 }, "Chat"),
      models.length
        ? section("Conversation", { key: "chat", class: "card chat", aside: h("label", null, "Model ", h("select", { value: model, onchange: (event) => { model = event.target.value; } }, models.map((one) => h("option", { value: one.id }, one.state && one.state !== "ready" ? `${one.id} (${one.state})` : one.id)))) },
            h("div", { class: "turns", role: "log", "aria-label": "Conversation", tabindex: 0 },
              turns.length ? turns.map((turn, index) => h("div", { key: index, class: `turn ${turn.role}` }, h("b", null, turn.role === "user" ? ctx.me.name : model), h("p", { class: "message" }, turn.content), turn.note ? h("small", null, turn.note) : null)) : empty("Ask the model something. Every answer is a job: it waits, runs and can be stopped like any other.")),
            h("form", { class: "search", onsubmit: say },
              h("textarea", { name: "text", "aria-label": "Message", placeholder: "Message (Enter sends, Shift+Enter makes a new line)", required: true, onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); event.target.form.requestSubmit(); } } }),
              running ? h("button", { type: "button", class: "danger", key: "stop", onclick: () => running?.abort() }, "Stop") : h("button", { class: "primary", key: "send" }, "Send"),
              turns.length && !running ? h("button", { type: "button", key: "again", onclick: () => { while (turns.at(-1)?.role === "assistant") turns.pop(); answer(); } }, "Answer again") : null),
            h("p", { class: "soft" }, link("/dashboard/jobs?topic=job.llm.*", null, "The jobs behind it")))
        : empty("No language model is served. Start one: ", h("code", null, "penstock up --model NAME"), "."),
    ],
  };
}
