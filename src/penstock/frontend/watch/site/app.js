// The live page: one snapshot a second comes in, and every section shows its part.
import {Chat} from "./chat.js";
import {byId, counted, patch} from "./dom.js";
import * as sections from "./sections.js";
import {keys, refusal, Stream, watchHeaders} from "./stream.js";

const KEPT = 180;
const ANSWER_MS = 8000; // how long what came of a click stands before the state of the connection does again
const history = [];
let chosen = null, isChosen = false, status = "", answeredAt = -ANSWER_MS;
let why = {}; // the decision about the chosen request, which leaves the latest ones before the request does

function say(text, isLost) {
  if (text !== status) byId("status").textContent = status = text;
  document.body.classList.toggle("stale", Boolean(isLost && history.length));
}

// What is shown is of then, once no snapshots come.
function lost(text, isLost) {
  const last = history[history.length - 1];
  say(isLost && last ? `${text}; below is what was seen at ${new Date(last.time_s * 1000).toLocaleTimeString()}` : text, isLost);
}

function transfers() {
  const found = new Map();
  if (history.length < 2) return found;
  const [before, now] = [history[Math.max(history.length - 6, 0)], history[history.length - 1]];
  const then = new Map(before.workers.flatMap((worker) => worker.links.map((link) => [`${link.source} ${worker.name}`, link.num_bytes])));
  const seconds = now.time_s - before.time_s || 1;
  for (const worker of now.workers) for (const link of worker.links) {
    const key = `${link.source} ${worker.name}`;
    found.set(key, Math.max(link.num_bytes - (then.get(key) ?? link.num_bytes), 0) / seconds);
  }
  return found;
}

function show() {
  const snapshot = history[history.length - 1];
  if (!snapshot) return;
  const overview = snapshot.overview;
  byId("served").textContent = snapshot.models.join(", ") || "no model yet";
  if (performance.now() - answeredAt >= ANSWER_MS) say(`live · ${counted(snapshot.num_workers, "worker")} · frontend process ${snapshot.pid}${overview && overview.frontends.length > 1 ? `, one of ${overview.frontends.length}` : ""} · version ${snapshot.version}`);
  patch(byId("alerts"), sections.alerts(snapshot));
  patch(byId("tiles"), sections.tiles(history));
  patch(byId("topology"), sections.topology(snapshot, transfers()));
  patch(byId("hits"), sections.hits(history));
  patch(byId("legend"), sections.legend());
  patch(byId("workers"), sections.workers(snapshot, kill));
  showRequests(snapshot);
  patch(byId("decisions"), sections.decisions(snapshot));
  patch(byId("planner"), sections.planner(overview));
  patch(byId("tenants"), sections.tenants(snapshot));
  chat.offer(snapshot.models);
}

function showRequests(snapshot) {
  if (!isChosen && snapshot.requests.length) chosen = snapshot.requests[0].request_id;
  patch(byId("requests"), sections.requests(snapshot, chosen, choose));
  const journey = snapshot.requests.find((each) => each.request_id === chosen);
  if (!journey && isChosen) return; // it has left the list: what was shown of it stays
  const decision = snapshot.decisions.findLast((each) => each.request_id === chosen);
  if (decision || why.request_id !== chosen) why = {request_id: chosen, decision};
  patch(byId("way"), sections.way(journey, why.decision));
}

async function choose(id) {
  [chosen, isChosen] = [id, true];
  const snapshot = history[history.length - 1];
  showRequests(snapshot);
  if (why.decision) return;
  const response = await fetch(`/watch/requests/${encodeURIComponent(id)}`, {headers: watchHeaders()});
  if (!response.ok || chosen !== id) return;
  const {journeys, decisions} = await response.json();
  why = {request_id: id, decision: decisions[decisions.length - 1]};
  patch(byId("way"), sections.way(journeys[0], why.decision));
}

async function kill(name) {
  const response = await fetch(`/watch/workers/${encodeURIComponent(name)}/kill`, {method: "POST", headers: {"X-Penstock-Page": "kill", ...watchHeaders()}});
  answeredAt = performance.now();
  say(response.ok ? `killed ${name}: its requests go on elsewhere, and it starts again` : await refusal(response));
}

function signIn(why) {
  byId("sign-in-why").textContent = why;
  byId("token").value = keys.token;
  byId("api-key").value = keys.api;
  if (!byId("sign-in").open) byId("sign-in").showModal();
}

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("penstock-theme", theme);
}

const stream = new Stream({
  onSnapshot: (snapshot) => { history.push(snapshot); if (history.length > KEPT) history.shift(); show(); },
  onStatus: lost,
  onKeyNeeded: () => signIn("This page asks for the admin token."),
});
const chat = new Chat(() => signIn("This server asks for an API key."));
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  [keys.token, keys.api] = [byId("token").value.trim(), byId("api-key").value.trim()];
  byId("sign-in").close();
  stream.restart();
});
byId("sign-in-cancel").addEventListener("click", () => byId("sign-in").close());
byId("keys").addEventListener("click", () => signIn("Change the keys of this tab."));
byId("pause").addEventListener("click", () => {
  const isPaused = byId("pause").getAttribute("aria-pressed") !== "true";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  stream.pause(isPaused);
});
byId("theme").addEventListener("click", () => {
  const now = localStorage.getItem("penstock-theme") || "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
setTheme(localStorage.getItem("penstock-theme") || "system");
stream.restart();
