// What each section shows of a snapshot.
import {bytes, h, percent, rate, table, time, whole} from "./dom.js";
import {kvMap, shares, spark, timeline, topology} from "./draw.js";

const NAMES = {error: "Error", warning: "Warning", info: "Note"};

export function alerts(snapshot) {
  if (!snapshot.alerts.length) return [h("li", {key: "fine", class: "alert fine"}, h("b", null, "Fine"), "nothing needs attention")];
  return snapshot.alerts.map((alert) => h("li", {key: alert.key, class: `alert ${alert.severity}`}, h("b", null, NAMES[alert.severity]), alert.text));
}

export function tiles(history) {
  const {overview, queued} = history[history.length - 1];
  const series = (pick) => history.map((snapshot) => (snapshot.overview ? pick(snapshot.overview) : null));
  const tile = (name, value, below, values, target) => h("div", {key: name}, h("dt", null, name), h("dd", null, value, h("small", null, below)), spark(values, target));
  if (!overview) return [tile("Queue", whole(queued), "requests wait", history.map((snapshot) => snapshot.queued))];
  const target = overview.target || {};
  const latency = (name, key, limit) => {
    const seen = overview[key];
    return tile(name, seen ? time(seen.p50) : "–", seen ? `p90 ${time(seen.p90)} · p99 ${time(seen.p99)}${limit ? ` · target ${time(limit)}` : ""}` : "none in 10 s",
      series((each) => (each[key] ? each[key].p90 : null)), limit);
  };
  return [
    tile("Requests/s", rate(overview.arrivals_per_s), overview.failed_per_s ? `${rate(overview.failed_per_s)} fail` : `${rate(overview.finished_per_s)} finish`, series((each) => each.arrivals_per_s)),
    latency("TTFT, median", "ttft", target.ttft_s),
    latency("ITL, median", "itl", target.itl_s),
    tile("Queue", whole(queued), queued ? `oldest ${time(overview.oldest_queued_s)}` : "nobody waits", history.map((snapshot) => snapshot.queued)),
    tile("Output tokens/s", rate(overview.output_tokens_per_s), `prompts ${rate(overview.prompt_tokens_per_s)}/s`, series((each) => each.output_tokens_per_s)),
    tile("Cached share of prompts", percent(overview.cached_share), `over ${overview.seconds.toFixed(0)} s`, series((each) => each.cached_share)),
  ];
}

const TIERS = ["device", "host", "disk", "object"];

function origins(snapshot) {
  const counts = Object.fromEntries([...TIERS, "computed"].map((name) => [name, 0]));
  for (const worker of snapshot.workers) {
    counts.computed += worker.prefilled_tokens;
    for (const tier of worker.tiers) counts[tier.tier] += tier.hit_tokens;
  }
  return counts;
}

export function hits(history) {
  const now = origins(history[history.length - 1]), then = origins(history[Math.max(history.length - 61, 0)]);
  const parts = (of) => Object.keys(now).map((name) => [name, Math.max(of(name), 0)]);
  const span = Math.min(history.length - 1, 60);
  return [shares(parts((name) => now[name]), "Since the workers started"),
    shares(parts((name) => now[name] - then[name]), `Last ${span} s`),
    h("p", {class: "legend"}, Object.keys(now).map((name) => h("span", null, h("span", {class: `swatch ${name}`}), name)))];
}

export const legend = () => [h("span", {class: "swatch active"}), "in use", h("span", {class: "swatch cached"}), "cached, free to evict", h("span", {class: "swatch"}), "free"];

export function workers(snapshot, kill) {
  const heads = ["Worker", "Role", "State", "Requests", "Speed", "KV by tier", "KV read from", ...(snapshot.can_kill ? ["Demo"] : [])];
  const rows = snapshot.workers.map((worker) => ({key: worker.name, cells: [
    h("span", {class: "whole-words", title: `process ${worker.pid}${worker.host ? ` on ${worker.host}` : ""}`}, worker.name),
    h("span", {class: `role ${worker.role}`}, worker.role),
    worker.problem ? `${worker.condition}: ${worker.problem}` : worker.condition.replace("_", " "),
    `${worker.running} run, ${worker.waiting} wait${worker.preemptions ? `, ${whole(worker.preemptions)} preempted` : ""}`,
    worker.speed && worker.speed.step_s !== null ? `${time(worker.speed.step_s)} a step, ${rate(worker.speed.generated_tokens_per_s)} tokens/s, prompts ${rate(worker.speed.prefilled_tokens_per_s)}/s` : "idle",
    worker.tiers.length ? worker.tiers.map((tier) => h("div", {key: tier.tier}, `${tier.tier}: ${whole(tier.cached_blocks)} of ${whole(tier.total_blocks)} cached${tier.is_off ? ", off" : ""}`, kvMap(worker, tier))) : "–",
    worker.links.length ? worker.links.map((link) => h("div", {key: link.source}, `${link.source}: ${bytes(link.num_bytes)} by ${link.transport}${link.seconds ? `, ${bytes(link.num_bytes / link.seconds)}/s` : ""}`)) : "–",
    ...(snapshot.can_kill ? [h("button", {type: "button", "aria-label": `Kill ${worker.name}`, onclick: () => kill(worker.name)}, "Kill")] : []),
  ]}));
  const more = snapshot.num_workers - snapshot.workers.length;
  return [table("Workers and their KV", heads, rows), more > 0 ? h("p", {class: "hint"}, `and ${more} more`) : null];
}

const lastWorker = (journey) => (journey.legs.length ? journey.legs[journey.legs.length - 1].worker : "waits");

export function requests(snapshot, chosen, choose) {
  return snapshot.requests.map((journey) => h("li", {key: journey.request_id},
    h("button", {type: "button", "aria-pressed": String(journey.request_id === chosen), onclick: () => choose(journey.request_id)},
      h("span", null, `${lastWorker(journey)}, ${whole(journey.prompt_tokens)} → ${whole(journey.output_tokens)} tokens`),
      h("span", {class: "outcome"}, `${journey.outcome || "under way"}, ${time(journey.seconds)}`))));
}

export function way(journey, decision) {
  if (!journey) return h("p", {class: "hint"}, "No request yet: send one by the chat below.");
  const steps = [[`Frontend`, `${whole(journey.prompt_tokens)} prompt tokens${journey.tenant ? ` of ${journey.tenant}` : ""}`],
    ["Router", decision ? `${decision.reason.replaceAll("_", " ")}${decision.next_worker ? `, next best ${decision.next_worker}` : ""}; queued ${time(journey.queued_s)}` : `queued ${time(journey.queued_s)}`]];
  let before = null;
  for (const leg of journey.legs) {
    if (leg.part === "decode" && before) steps.push(["KV transfer", `${before.worker} to ${leg.worker}, ${time((leg.first_token_s ?? journey.seconds) - leg.sent_s)} to its first token`]);
    const name = {prefill: "Prefill", decode: "Decode", whole: before ? "Goes on" : "Prefill and decode"}[leg.part];
    steps.push([name, `${leg.worker}, ${time((leg.ended_s ?? journey.seconds) - leg.sent_s)}`]);
    before = leg;
  }
  const cached = journey.cached_tokens === null ? "" : `${whole(journey.cached_tokens)} of ${whole(journey.prompt_tokens)} prompt tokens were cached. `;
  return [h("p", null, h("code", null, journey.request_id)),
    h("ol", {class: "steps"}, steps.map(([name, below]) => h("li", null, h("b", null, name), h("span", null, below)))),
    h("div", {class: "scrolls", tabindex: 0, role: "group", "aria-label": "Its time"}, timeline(journey)),
    h("p", null, `${cached}${whole(journey.output_tokens)} tokens of output, ${journey.outcome || "under way"}${journey.migrations ? `, moved ${journey.migrations} times as workers were lost` : ""}.`),
    decision ? reasons(decision) : null];
}

const cost = (value, unit) => (value === null ? "never" : `${value.toFixed(1)}${unit === "none" ? "" : `\u00a0${unit}`}`);

function reasons(decision) {
  const prefill = decision.prefill;
  const parts = [];
  if (prefill) {
    const compared = prefill.local === null || prefill.prefill === null || prefill.decode === null ? "" :
      `: ${cost(prefill.prefill, decision.unit)} on ${prefill.prefill_worker} and ${cost(prefill.decode, decision.unit)} on ${prefill.decode_worker}, against ${cost(prefill.local, decision.unit)} on ${prefill.local_worker} alone`;
    parts.push(h("p", null, `Prompt ${prefill.remote ? "by a prefill worker" : "where the answer is"}${compared}.`));
    if (prefill.candidates.length) parts.push(candidates("Prefill workers by cost", prefill.candidates, decision.unit));
  }
  parts.push(candidates("Workers by cost", decision.candidates, decision.unit));
  return parts;
}

function candidates(caption, found, unit) {
  const terms = Object.keys(found[0].terms).filter((term) => found.some((one) => Math.abs(one.terms[term]) >= 0.05));
  return h("div", {class: "scrolls"}, table(caption, [caption, "#cost", ...terms.map((term) => `#${term}`), "#cached blocks"], found.map((one, index) => ({
    key: one.worker, chosen: index === 0,
    cells: [one.worker, cost(one.cost, unit), ...terms.map((term) => one.terms[term].toFixed(1)), whole(one.overlap_blocks)],
  }))));
}

export function decisions(snapshot) {
  const rows = [...snapshot.decisions].reverse().map((decision) => {
    const chosen = decision.candidates[0];
    const terms = Object.entries(chosen.terms).filter(([, value]) => Math.abs(value) >= 0.05).map(([name, value]) => `${name} ${value.toFixed(1)}`).join(" + ");
    const prompt = decision.prefill && decision.prefill.worker;
    return {key: decision.request_id + decision.worker, cells: [h("span", {class: "whole-words"}, `${time(decision.age_s)} ago`), prompt ? `${prompt}, then ${decision.worker}` : decision.worker,
      decision.reason.replaceAll("_", " "), `${whole(chosen.overlap_blocks)} of ${whole(decision.request_blocks)} blocks`, cost(chosen.cost, decision.unit), terms || "–",
      decision.next_worker || "nobody", decision.left_out.map((left) => `${left.worker} ${left.why}`).join(", ") || "–"]};
  });
  return rows.length ? table("Routing decisions, newest first", ["When", "Worker", "Why", "Cached", "#Cost", "Terms", "Next best", "Left out"], rows) : h("p", {class: "hint"}, "No request yet.");
}

export function planner(overview) {
  if (!overview || overview.planner === null) return h("p", {class: "hint"}, "No planner: penstock serve --max-workers N starts one.");
  if (!overview.planner.length) return h("p", {class: "hint"}, "It has not decided yet.");
  return h("ul", null, overview.planner.map((round) => h("li", {key: round.number},
    h("b", null, `${new Date(round.time_s * 1000).toLocaleTimeString()} ${round.outcome.replace("_", " ")}`), ` ${round.text}`,
    round.terms.length ? h("details", null, h("summary", null, "Terms"), table(`Terms of round ${round.number}`, ["Role", "#now", "#floor", "#reaction", "#keep", "#choice"],
      round.terms.map((term) => ({key: term.role, cells: [term.role, ...[term.now, term.floor, term.reaction, term.keep, term.choice].map(whole)]})))) : null)));
}

export function tenants(snapshot) {
  if (!snapshot.tenants.length) return h("p", {class: "hint"}, "No tenants: no API keys are set.");
  const limit = (value) => (value === null ? "–" : whole(value));
  return table("Tenants in this frontend process", ["Tenant", "#in flight", "#at most", "#requests/s", "#tokens/min", "#tokens left"], snapshot.tenants.map((tenant) => ({
    key: tenant.name, cells: [tenant.name, whole(tenant.inflight), limit(tenant.concurrency), limit(tenant.requests_per_s), limit(tenant.tokens_per_min), limit(tenant.tokens_left)],
  })));
}

export {topology};
