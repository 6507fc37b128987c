// A chat that says which worker answered, and what was cached.
import {byId, h, patch, time, whole} from "./dom.js";
import {chatHeaders, lines, refusal, watchHeaders} from "./stream.js";

const TRIES = 20; // several frontend processes share a port, and one knows the request

export class Chat {
  constructor(onKeyNeeded) {
    this.onKeyNeeded = onKeyNeeded;
    this.turns = [];
    this.aborter = null;
    byId("chat").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("stop").addEventListener("click", () => this.aborter && this.aborter.abort());
    byId("forget").addEventListener("click", () => { if (this.aborter) this.aborter.abort(); this.turns = []; this.show(); byId("message").focus(); });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
  }

  offer(models) {
    patch(byId("model"), models.map((name) => h("option", {key: name, value: name}, name)));
  }

  show() {
    patch(byId("talk"), this.turns.map((turn, index) => h("p", {key: index, class: turn.role},
      h("span", {class: "who"}, turn.role === "user" ? "you" : byId("model").value), turn.content,
      turn.meta ? h("span", {class: "meta"}, `\n${turn.meta}`) : null)));
    byId("talk").scrollTop = byId("talk").scrollHeight;
    byId("send").disabled = this.aborter !== null;
    byId("stop").disabled = this.aborter === null;
  }

  async send() {
    const content = byId("message").value.trim();
    if (!content || this.aborter) return;
    byId("message").value = "";
    this.turns.push({role: "user", content});
    const answer = {role: "assistant", content: "", meta: ""};
    const messages = this.turns.filter((turn) => turn.content).map(({role, content: said}) => ({role, content: said}));
    this.turns.push(answer);
    const aborter = (this.aborter = new AbortController());
    this.show();
    const began = performance.now();
    let id = "", usage = null, first = null;
    try {
      const response = await fetch("/v1/chat/completions", {method: "POST", signal: aborter.signal,
        headers: {"Content-Type": "application/json", ...chatHeaders()},
        body: JSON.stringify({model: byId("model").value, messages, stream: true, stream_options: {include_usage: true}})});
      if (response.status === 401) { this.onKeyNeeded(); throw new Error("this server asks for an API key"); }
      if (!response.ok) throw new Error(await refusal(response));
      for await (const line of lines(response)) {
        if (!line.startsWith("data: {")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        id = event.id || id;
        usage = event.usage || usage;
        const delta = event.choices.length ? event.choices[0].delta.content : "";
        if (delta) { first = first ?? performance.now(); answer.content += delta; this.show(); }
      }
      answer.meta = await this.told(id, usage, began, first);
    } catch (error) {
      answer.meta = error.name === "AbortError" ? "stopped" : `no answer: ${error.message}`;
    }
    this.aborter = null;
    this.show();
    byId("message").focus();
  }

  async told(id, usage, began, first) {
    const parts = [];
    const journey = await this.journey(id);
    if (journey) parts.push(`by ${journey.legs.map((leg) => (leg.part === "prefill" ? `${leg.worker} (prompt)` : leg.worker)).join(", ")}`);
    if (usage) parts.push(`${whole(usage.prompt_tokens_details.cached_tokens)} of ${whole(usage.prompt_tokens)} prompt tokens cached`, `${whole(usage.completion_tokens)} tokens`);
    if (first) parts.push(`first after ${time((first - began) / 1000)}`);
    return parts.join(" · ");
  }

  async journey(id) {
    for (let tries = 0; tries < TRIES; tries += 1) {
      const response = await fetch(`/watch/requests/${encodeURIComponent(id)}`, {headers: watchHeaders(), cache: "no-store"});
      if (response.ok) {
        const [journey] = (await response.json()).journeys;
        if (journey.outcome !== null) return journey;
      } else if (response.status !== 404) return null;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    return null;
  }
}
