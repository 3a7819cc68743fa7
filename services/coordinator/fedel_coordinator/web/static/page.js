// The live page: follows one run with server-sent events and draws what changed.

import { Agents } from "./agents.js";
import { lines, phases, tensorMap, windows } from "./charts.js";
import { drawRuns, isOver, mostInteresting } from "./runs.js";
import { Table, against } from "./table.js";
import { $, blocks, bytes, el, percent, say, seconds, signed, unitOf, windowBar } from "./text.js";

const MAX_LOG = 200, HISTORY = 200, SHOWN = 1000;
const state = { runs: [], run: "", client: "", head: null, setting: null, rounds: [], history: [], offset: 0, canControl: false };
let source = null, drawing = 0;

const clock = () => Date.now() / 1000 + state.offset;
const agents = new Agents(get);
const table = new Table((client) => go({ client }));
table.clock = clock;

const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function go(change) {
  const next = new URLSearchParams({ run: state.run, client: state.client, ...change });
  if (!next.get("client")) next.delete("client");
  location.hash = next.toString();
}

async function get(path) {
  const response = await fetch(path);
  const answer = await response.json();
  if (response.status === 401) $("login").hidden = false;
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const url = (...parts) => "/api/runs/" + parts.map(encodeURIComponent).join("/");

async function loadRuns() {
  const answer = await get("/api/runs");
  Object.assign(state, { runs: answer.runs, canControl: answer.can_control, offset: answer.now - Date.now() / 1000 });
  $("empty").hidden = state.runs.length > 0;
  agents.showWithout(state.runs);
  if (!state.runs.length) linked("live", "live");
  drawRuns(state.runs, state.run, clock());
  const wanted = place().run || state.run || mostInteresting(state.runs);
  if (wanted && wanted !== state.run) await openRun(wanted);
}

async function openRun(name) {
  source?.close();
  state.run = name;
  let found;
  try {
    found = await get(url(name));
  } catch (error) {
    linked("lost", error.message);
    return;
  }
  Object.assign(state, { head: found, setting: found, rounds: [], history: [] });
  table.reset(found.blocks.length);
  table.put(found.clients);
  $("log").replaceChildren();
  $("main").hidden = false;
  drawRuns(state.runs, state.run, clock());
  follow(name, Math.max(0, found.rounds_closed - SHOWN));
  await openClient(place().client ?? "");
}

/** Follow a run from a round on: a page of a long run opens as soon as that of a short one. */
function follow(name, since) {
  source = new EventSource(`${url(name, "events")}?since=${since}`);
  const on = (kind, act) => source.addEventListener(kind, (event) => { act(JSON.parse(event.data)); later(); });
  source.onopen = () => linked("live", "live");
  source.onerror = () => linked("lost", "connection lost, reconnecting");
  on("status", (head) => { state.head = head; state.offset = head.now - Date.now() / 1000; });
  on("clients", (rows) => table.put(rows));
  on("seen", (seen) => { table.seen = seen; });
  on("log", addEvents);
  on("round", (round) => {
    if (state.rounds.length && round.round <= state.rounds.at(-1).round) return;
    state.rounds.push(round);
    if (state.client) loadHistory();
  });
  on("end", ({ phase }) => { source.close(); linked("", `run ${phase}`); loadRuns(); });
}

function linked(kind, text) {
  $("link").className = kind;
  $("link").textContent = text;
}

function later() {
  if (!drawing) drawing = setTimeout(() => requestAnimationFrame(() => { drawing = 0; draw(); }), 150);
}

function draw() {
  drawHead();
  drawRounds();
  table.draw();
  drawClient();
}

const figure = (name, value, note = "", title = "") =>
  [el("dt", title ? { title } : {}, name), el("dd", {}, value, note ? el("small", {}, note) : null)];
const T_TH = "Time budget of one training step, the same for every device: as much as the fastest needs for the whole model. A slow device trains the part of the model that fits into it.";

function pairs(list, figures) {
  list.replaceChildren(...figures.map(([dt, dd]) => el("div", {}, dt, dd)));
}

function drawHead() {
  const { head, setting } = state, open = head.open_round;
  document.title = `${head.run}: ${open ? `round ${open.round + 1} of ${head.num_rounds}` : head.phase}`;
  $("name").textContent = head.run;
  $("about").textContent = `${head.strategy} on ${setting.model}: ${setting.blocks.length} blocks, ${bytes(setting.model_bytes)}; seed ${setting.config.seed}; ${head.phase}`;
  say($("notice"), head.message);
  $("notice").hidden = !head.message;
  const step = open ? open.phase : ["waiting", "running"].includes(head.phase) ? "wait" : "";
  for (const item of $("steps").children)
    item.dataset.step === step ? item.setAttribute("aria-current", "step") : item.removeAttribute("aria-current");
  pairs($("figures"), figures());
  $("fetch").hidden = !isOver(head);
  say($("fetch-command"), `fedel runs fetch ${head.run} --coordinator HOST:PORT`);
  $("verbs").hidden = !state.canControl || isOver(head);
  const paused = head.phase === "paused";
  for (const [verb, hidden] of [["pause", paused], ["resume", !paused]]) document.querySelector(`#verbs [value=${verb}]`).hidden = hidden;
}

function figures() {
  const { head, rounds, setting } = state, open = head.open_round, last = rounds.at(-1);
  const tested = rounds.findLast((r) => r.accuracy !== null), own = rounds.findLast((r) => r.client_tests)?.client_tests.overall;
  const rows = [...table.rows.values()];
  const full = last ? setting.model_bytes * Math.max(1, last.num_updates) : 0;
  return [
    figure("Round", open ? `${open.round + 1}` : "–", `${last ? last.round + 1 : 0} of ${head.num_rounds} closed`),
    figure("This round", open ? seconds(Math.max(0, clock() - open.opened_at)) : "–", open ? `deadline ${seconds(open.deadline_seconds)}` : "no open round"),
    figure("Updates", open ? `${open.num_done} of ${open.num_tasks}` : last ? `${last.num_updates} of ${last.num_tasks}` : "–",
      open?.num_lost ? `${open.num_lost} lost` : open ? "this round" : "last round"),
    figure("T_th", seconds(head.budget_seconds || last?.budget_seconds || null), "time budget per step, all clients", T_TH),
    figure("Accuracy", tested ? percent(tested.accuracy) : "–", head.best_accuracy === null ? "not tested yet" : `best ${percent(head.best_accuracy)}`),
    ...(own ? [figure("On own data", percent(own.mean_accuracy), `worst ${percent(own.worst_accuracy)} (${own.worst_client}), ${own.num_clients} clients`)] : []),
    figure("Clients", `${rows.filter((r) => r.connected).length} of ${rows.length}`, "connected"),
    figure("Last round", last ? seconds(last.latency_seconds) : "–", last?.deviation ? `slowest client ${signed(last.deviation.max)} against T_th` : ""),
    figure("Sent by clients", last ? bytes(last.bytes_up) : "–", full ? `${percent(1 - last.bytes_up / full, 0)} less than the whole model` : ""),
  ];
}

function drawRounds() {
  const { rounds, setting } = state;
  let time = 0;
  const accuracy = [];
  for (const r of rounds) {
    time += r.latency_seconds;
    if (r.accuracy !== null) accuracy.push([time, 100 * r.accuracy]);
  }
  // The API counts rounds from 0, people from 1.
  const each = (value) => rounds.map((r) => [r.round + 1, value(r)]);
  const first = rounds.length ? rounds[0].round + 1 : 1, x = [first, Math.max(first + 1, first + rounds.length - 1)];
  lines($("accuracy"), { series: [{ points: accuracy, name: "one", label: "test accuracy", dots: accuracy.length < 60 }], xName: first > 1 ? `training time since round ${first}, s` : "training time, s", yName: "test accuracy, %" });
  lines($("latency"), { series: [{ points: each((r) => r.latency_seconds), name: "one", label: "round" }], xName: "round", yName: "seconds", whole: true, x });
  const [unit, size] = unitOf(Math.max(...rounds.map((r) => Math.max(r.bytes_up, r.bytes_down)), 0));
  const sent = (key, name, label) => ({ points: each((r) => r[key] / size), name, label });
  lines($("bytes"), {
    series: [sent("bytes_up", "one", "up"), sent("bytes_down", "two", "down")],
    xName: "round", yName: unit, whole: true, x,
  });
  const share = (r) => r.tensor_clients.map((n) => n / Math.max(1, r.num_updates));
  tensorMap($("map"), setting.tensors, rounds.slice(-HISTORY).map((r) => [r.round + 1, share(r)]), (round, tensor, level) => {
    $("map").nextElementSibling.textContent = `round ${round}, ${tensor.name} (block ${tensor.block}): ${percent(level, 0)} of the clients`;
  });
}

async function openClient(name) {
  const before = state.client;
  Object.assign(state, { client: name, history: [] });
  table.chosen = name;
  $("client").hidden = !name;
  if (name) {
    await loadHistory();
    $("client-name").focus({ preventScroll: true });
  } else if (before) {
    table.made.get(before)?.element.querySelector("button")?.focus({ preventScroll: true });
  }
  draw();
}

async function loadHistory() {
  const name = state.client, run = state.run;
  // In the history rounds count from 1, so that the last one is the next index.
  const since = state.history.length ? state.history.at(-1).round : Math.max(0, state.head.rounds_closed - HISTORY);
  let rounds;
  try {
    ({ rounds } = await get(`${url(run, "rounds")}?since=${since}&client=${encodeURIComponent(name)}`));
  } catch (error) {
    linked("lost", error.message);
    return;
  }
  if (state.client !== name || state.run !== run) return;
  const known = state.history.at(-1)?.round ?? 0;
  const fresh = rounds.filter((r) => r.round >= known).map((r) => ({ round: r.round + 1, ...(r.client ?? { window: null, selected: [], missing: true }) }));
  state.history = [...state.history, ...fresh].slice(-HISTORY);
  later();
}

function drawClient() {
  const row = table.rows.get(state.client), { history, setting } = state;
  if (!state.client || !row) return;
  $("client-name").textContent = row.client;
  const range = row.window, here = row.connected ? row.phase : "not connected";
  pairs($("client-figures"), [
    figure("Device", row.device_type || "unknown", `${row.num_samples} samples`),
    figure("Phase", here, `last message ${table.age(row.client)}`),
    figure("Window", windowBar(range, setting.blocks.length), range ? `${blocks(range)} of ${setting.blocks.length}; restarts: ${row.resets}` : "no window"),
    figure("Time and T_th", against(row)),
  ]);
  windows($("windows"), history, setting.blocks.length);
  phases($("seconds"), history.filter((h) => !h.missing));
  const columns = history.map((h) => { const mine = new Set(h.selected); return [h.round, setting.tensors.map((t) => (mine.has(t.name) ? 1 : 0))]; });
  tensorMap($("mine"), setting.tensors, columns, (round, tensor, level) => {
    $("mine").nextElementSibling.textContent = `round ${round}, ${tensor.name} (block ${tensor.block}): ${level ? "trained" : "not trained"}`;
  });
}

function addEvents(events) {
  for (const event of events) {
    const at = new Date(event.at * 1000), newest = $("log").firstElementChild;
    // What happens again and again is one line, or it would push everything else out of sight.
    const times = newest?.dataset.text === event.text ? Number(newest.dataset.times) + 1 : 1;
    if (times > 1) newest.remove();
    const level = event.level === "info" ? null : el("b", {}, `${event.level}: `);
    const again = times > 1 ? el("small", {}, ` (${times} times)`) : null;
    $("log").prepend(el("li", { class: event.level, "data-text": event.text, "data-times": times },
      el("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString()), el("span", {}, level, event.text, again)));
  }
  while ($("log").children.length > MAX_LOG) $("log").lastChild.remove();
}

const bearer = (id) => ({ method: "POST", headers: { Authorization: `Bearer ${$(id).value}` } });

async function login(event) {
  event.preventDefault();
  const response = await fetch("/api/login", bearer("view-token"));
  const answer = await response.json();
  $("login").hidden = response.ok;
  $("login-answer").textContent = response.ok ? "" : answer.error;
  $("view-token").value = "";
  if (response.ok) await loadRuns();
}

async function control(event) {
  event.preventDefault();
  const verb = event.submitter.value;
  if (verb.startsWith("stop") && !confirm(`Stop ${state.run}? It cannot be resumed.`)) return;
  const body = JSON.stringify({ why: $("why").value });
  const response = await fetch(url(state.run, verb), { ...bearer("token"), body });
  const answer = await response.json();
  $("answer").textContent = response.ok ? `${event.submitter.textContent}: accepted` : answer.error;
}

window.addEventListener("hashchange", () => {
  const { run = state.run, client = "" } = place();
  if (run !== state.run) openRun(run);
  else if (client !== state.client) openClient(client);
});
window.addEventListener("resize", () => state.head && later());
window.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.client) go({ client: "" }); });
$("close").addEventListener("click", () => go({ client: "" }));
$("verbs").addEventListener("submit", control);
for (const [id, kind] of [["all-runs", "toggle"], ["find-run", "input"]])
  $(id).addEventListener(kind, () => drawRuns(state.runs, state.run, clock()));
$("login").addEventListener("submit", login);
setInterval(() => { if (state.head && !document.hidden) { drawHead(); table.tick(); } }, 1000);
setInterval(() => { if (!document.hidden) loadRuns().catch((error) => linked("lost", error.message)); }, 5000);
loadRuns().catch((error) => linked("lost", error.message));
