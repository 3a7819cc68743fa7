// The list of agents, whether they are in a run or not: search, filter, and the traceback of a last error.

import { $, ago, bytes, el, say } from "./text.js";

const PAGE = 50, POLL_SECONDS = 5;
const SHOWN = {
  all: () => true,
  here: (agent) => agent.connected,
  away: (agent) => !agent.connected,
  cordoned: (agent) => agent.cordoned,
  error: (agent) => agent.last_error !== null,
};
const BAD = ["refused", "silent"];

export class Agents {
  /** `get` fetches JSON from a path. */
  constructor(get) {
    Object.assign(this, { get, agents: [], offset: 0, limit: PAGE, open: "", trace: "" });
    this.body = $("agents").tBodies[0];
    this.body.addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.agent;
      if (name) this.choose(name);
    });
    for (const id of ["fleet-search", "fleet-show"]) $(id).addEventListener("input", () => this.draw());
    $("fleet-filter").addEventListener("submit", (event) => event.preventDefault());
    $("fleet-more").addEventListener("click", () => { this.limit += PAGE; this.draw(); });
    $("fleet-open").addEventListener("toggle", () => this.load());
    setInterval(() => { if (!document.hidden && $("fleet-open").open) this.load(); }, 1000 * POLL_SECONDS);
  }

  /** Without a run there is nothing else to look at. */
  showWithout(runs) {
    if (!runs.length && $("fleet").hidden) $("fleet-open").open = true;
    if ($("fleet").hidden) this.load();
  }

  async load() {
    const agents = [];
    let answer = { next: "" };
    try {
      while (answer.next !== null) {
        answer = await this.get(`/api/agents?after=${encodeURIComponent(answer.next)}`);
        agents.push(...answer.agents);
      }
    } catch {
      return; // the page says elsewhere that the connection is lost
    }
    Object.assign(this, { agents, offset: answer.now - Date.now() / 1000 });
    $("fleet").hidden = false;
    this.draw();
  }

  async choose(name) {
    this.open = this.open === name ? "" : name;
    this.trace = "";
    if (this.open) this.trace = (await this.get(`/api/agents/${encodeURIComponent(name)}`)).last_error?.trace ?? "";
    this.draw();
  }

  draw() {
    const here = this.agents.filter((agent) => agent.connected).length;
    const wrong = this.agents.filter((agent) => agent.last_error).length;
    const errors = wrong ? `, ${wrong} with an error` : "";
    say($("fleet-count"), this.agents.length ? `${this.agents.length}, ${here} connected${errors}` : "none has connected yet");
    const text = $("fleet-search").value.trim().toLowerCase(), show = SHOWN[$("fleet-show").value];
    const wanted = this.agents.filter((agent) => show(agent) && (!text || words(agent).includes(text)));
    const shown = wanted.slice(0, this.limit);
    const focus = document.activeElement?.dataset?.agent;
    this.body.replaceChildren(...shown.flatMap((agent) => (agent.name === this.open ? [this.row(agent), this.details(agent)] : [this.row(agent)])));
    if (focus) [...this.body.querySelectorAll("button")].find((b) => b.dataset.agent === focus)?.focus({ preventScroll: true });
    $("agents").hidden = !this.agents.length;
    $("fleet-filter").hidden = !this.agents.length;
    say($("fleet-shown"), this.agents.length ? `${shown.length} of ${wanted.length} agents` : "An agent is listed here from its first session on: fedel agent --config agent.toml");
    $("fleet-more").hidden = shown.length >= wanted.length;
  }

  row(agent) {
    const error = agent.last_error, clock = Date.now() / 1000 + this.offset;
    const button = el("button", { type: "button", "data-agent": agent.name, "aria-expanded": agent.name === this.open }, agent.name);
    const labels = Object.entries(agent.labels).sort().map(([key, value]) => el("code", {}, `${key}=${value}`));
    return el("tr", { class: agent.connected ? "" : "away" },
      el("td", {}, button, el("small", {}, ` ${agent.device_type || "unknown device"}`)),
      el("td", { class: `state ${BAD.includes(agent.state) ? "bad" : ""}` }, agent.state),
      el("td", { class: "labels" }, ...labels.flatMap((label) => [label, " "])),
      el("td", { class: "bytes" }, agent.memory_bytes ? bytes(agent.memory_bytes) : "–", el("small", {}, link(agent))),
      el("td", { class: "version" }, agent.agent_version || "–", el("small", {}, certificate(agent, clock))),
      el("td", { class: "seen" }, ago(clock - agent.last_seen)),
      el("td", { class: "error" }, error ? `${ago(clock - error.at)}${about(error)}: ${error.message}` : ""));
  }

  details(agent) {
    const error = agent.last_error;
    return el("tr", { class: "details" }, el("td", { colspan: 7 },
      el("p", {}, agent.runs.length ? `Runs: ${agent.runs.join(", ")}.` : "In no run.", ` Protocol ${agent.protocol}.`),
      el("p", {}, error ? `Last error${about(error)}: ${error.message}` : "No error so far."),
      this.trace ? el("pre", { tabindex: 0, "aria-label": "traceback" }, this.trace) : null));
  }
}

const words = (agent) =>
  [agent.name, agent.device_type, agent.state, ...Object.entries(agent.labels).map(([key, value]) => `${key}=${value}`)].join(" ").toLowerCase();

const about = (error) => (error.run ? ` in ${error.run}` : "") + (error.round === null ? "" : `, round ${error.round + 1}`);

function link(agent) {
  const { up_bytes_per_second: up, down_bytes_per_second: down } = agent;
  if (!up && !down) return " link not measured";
  return ` ${up ? bytes(up) : "–"}/s up, ${down ? bytes(down) : "–"}/s down`;
}

function certificate(agent, clock) {
  if (!agent.certificate_end) return " no certificate";
  const days = Math.floor((agent.certificate_end - clock) / 86400);
  return days < 0 ? " certificate expired" : ` ${days} days left`;
}
