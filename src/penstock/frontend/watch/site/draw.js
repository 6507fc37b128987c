// Pictures: sparklines, the topology, a KV map, shares as a bar, and a request's way in time.
import {bytes, counted, h, percent, time, whole} from "./dom.js";

export function spark(values, target) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, target || 0) * 1.1 || 1;
  const x = (index) => (index * 200) / Math.max(values.length - 1, 1);
  const y = (value) => 32 - (value / top) * 30;
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${x(index).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  });
  return h("svg", {viewBox: "0 0 200 34", preserveAspectRatio: "none", "aria-hidden": "true"},
    target ? h("line", {class: "target", x1: 0, x2: 200, y1: y(target), y2: y(target)}) : null,
    h("path", {class: "spark", d: path || "M0,32"}));
}

const DRAWN_MAX = 12;

export function topology(snapshot, transfers) {
  const groups = ["prefill", "aggregated", "decode", "other regions"]
    .map((group) => [group, snapshot.workers.filter((worker) => (worker.region ? "other regions" : worker.role) === group)])
    .filter(([, workers]) => workers.length);
  const nodes = [], places = new Map();
  let y = 10;
  for (const [role, workers] of groups) {
    nodes.push(h("text", {x: 270, y: y + 10, class: "soft"}, `${role} (${workers.length})`));
    y += 18;
    for (const worker of workers.slice(0, DRAWN_MAX)) {
      places.set(worker.name, y + 16);
      nodes.push(box(270, y, 180, worker.name, `${worker.running} run, ${worker.waiting} wait`,
        serves(worker) ? worker.role : "bad"));
      if (worker.region) nodes.push(...far(worker, y));
      y += 40;
    }
    if (workers.length > DRAWN_MAX) {
      nodes.push(h("text", {x: 270, y: y + 8, class: "soft"}, `and ${workers.length - DRAWN_MAX} more`));
      y += 18;
    }
    y += 6;
  }
  const height = Math.max(y, 90), middle = height / 2 - 16;
  const overview = snapshot.overview;
  const frontends = overview ? overview.frontends.length || 1 : 1;
  const edges = [h("path", {class: "edge", d: `M104,${middle + 16}H124`, "stroke-width": 2})];
  for (const worker of snapshot.workers) {
    const at = places.get(worker.name);
    if (at) edges.push(h("path", {class: "edge", d: `M222,${middle + 16}C250,${middle + 16} 240,${at} 270,${at}`, "stroke-width": 1 + Math.min(worker.open_requests, 8) / 2}));
    for (const link of worker.links) {
      const from = places.get(link.source);
      if (!at || !from) continue;
      const speed = transfers.get(`${link.source} ${worker.name}`) || 0;
      edges.push(h("path", {class: "edge transfer", d: `M450,${from}C500,${from} 500,${at} 450,${at}`, "stroke-width": speed ? 3 : 1.2},
        h("title", null, `KV ${link.source} to ${worker.name} by ${link.transport}: ${bytes(link.num_bytes)} since start`)));
      nodes.push(h("text", {x: 492, y: (from + at) / 2 + 4, class: "soft"}, `${link.transport} ${speed ? `${bytes(speed)}/s` : bytes(link.num_bytes)}`));
    }
  }
  const said = groups.map(([group, workers]) => (group === "other regions" ? `${workers.length} ${group}` : `${workers.length} ${group} workers`)).join(", ") || "no workers";
  return h("svg", {viewBox: `0 0 600 ${height}`, width: "100%", role: "img", "aria-label": `Clients reach ${frontends} frontends with a router, and these ${said}.`},
    edges, box(4, middle, 100, frontends === 1 ? "frontend" : `${frontends} frontends`, `${snapshot.queued} queued`, ""),
    box(124, middle, 98, "router", counted(snapshot.models.length, "model"), ""), nodes);
}

function far(worker, y) {
  const {name, round_trip_s: away, frontends, healthy, advertised_age_s: age} = worker.region;
  const state = !serves(worker) ? worker.condition.replace("_", " ") : away === null ? "not measured" : `${time(away)} away`;
  return [h("text", {x: 458, y: y + 14}, `${state}, ${healthy}/${frontends} up`,
    h("title", null, `region ${name}: ${healthy} of ${frontends} frontends answer; the time there and back is measured`)),
    h("text", {x: 458, y: y + 27, class: "soft"}, age === null ? "no prefix summary" : `prefix summary ${time(age)} ago`)];
}

const serves = (worker) => worker.condition === "ready" || worker.condition === "prefill_only";

const short = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

function box(x, y, width, name, below, kind) {
  return h("g", null, h("title", null, name), h("rect", {class: `box ${kind}`, x, y, width, height: 32, rx: 5, "stroke-width": 1.6}),
    h("text", {x: x + 8, y: y + 14}, short(name, Math.floor(width / 7))), h("text", {x: x + 8, y: y + 27, class: "soft"}, below));
}

const CELLS = 40;

export function kvMap(worker, tier) {
  const total = tier.total_blocks || 1;
  const cells = (blocks) => (blocks ? Math.max(1, Math.round((CELLS * blocks) / total)) : 0);
  const active = cells(tier.active_blocks), cached = cells(Math.max(tier.cached_blocks - tier.active_blocks, 0));
  const kind = (index) => (index < active ? "active" : index < active + cached ? "cached" : "free");
  const said = `${worker.name} ${tier.tier}: of ${whole(total)} blocks ${whole(tier.active_blocks)} in use, ${whole(tier.cached_blocks)} cached`;
  return h("svg", {class: `kv ${tier.is_off ? "off" : ""}`, viewBox: "0 0 200 20", width: 200, height: 20, role: "img", "aria-label": said},
    h("title", null, said),
    Array.from({length: CELLS}, (_, index) => h("rect", {class: `cell-${kind(index)}`, x: (index % 20) * 10, y: index < 20 ? 0 : 10, width: 9, height: 9, rx: 1.5})));
}

export function shares(parts, label) {
  const total = parts.reduce((sum, [, count]) => sum + count, 0);
  if (!total) return h("p", {class: "hint"}, `${label}: no prompt yet`);
  let x = 0;
  const bars = parts.map(([name, count]) => {
    const width = (300 * count) / total, rect = h("rect", {class: `bar-${name}`, x, y: 0, width, height: 16});
    x += width;
    return rect;
  });
  const said = parts.filter(([, count]) => count).map(([name, count]) => `${name} ${percent(count / total)}`).join(", ");
  return h("div", null, h("p", null, `${label}: ${said} of ${whole(total)} tokens`),
    h("svg", {viewBox: "0 0 300 16", width: "100%", height: 16, preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${said}`}, bars));
}

export function timeline(journey) {
  const total = journey.seconds || 1e-6, x = (seconds) => (680 * Math.min(seconds, total)) / total;
  const at = (leg) => short(leg.worker, 40);
  const spans = [["wait", "router queue", 0, journey.queued_s]];
  journey.legs.forEach((leg, index) => {
    const end = leg.ended_s ?? total, first = leg.first_token_s;
    const before = journey.legs[index - 1];
    if (leg.part === "prefill") spans.push(["prefill", `prefill at ${at(leg)}`, leg.sent_s, end]);
    else if (leg.part === "decode" && before) {
      spans.push(["transfer", `KV to ${at(leg)}, first step`, leg.sent_s, first ?? end], ["decode", `decode at ${at(leg)}`, first ?? end, end]);
    } else spans.push(["wait", `until ${at(leg)}'s first token`, leg.sent_s, first ?? end], [leg.part, `decode at ${at(leg)}`, first ?? end, end]);
  });
  const shown = spans.filter(([, , from, to]) => to > from);
  return h("svg", {viewBox: `0 0 700 ${shown.length * 22 + 4}`, width: "100%", role: "img", "aria-label": shown.map(([, name, from, to]) => `${name}: ${time(to - from)}`).join("; ") || "nothing yet"},
    shown.map(([kind, name, from, to], index) => {
      const left = x(from), width = Math.max(x(to) - left, 1.5), isLate = left > 430;
      return h("g", null, h("rect", {class: `time-${kind}`, x: left, y: index * 22 + 2, width, height: 16, rx: 2, opacity: 0.5}),
        h("text", {x: isLate ? Math.max(left - 4, 0) : left + 4, y: index * 22 + 14, "text-anchor": isLate ? "end" : "start"}, `${name}: ${time(to - from)}`));
    }));
}
