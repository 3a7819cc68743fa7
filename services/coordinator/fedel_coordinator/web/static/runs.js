// The runs of a coordinator: a few as buttons, all of them in a table that can be searched.

import { $, ago, el, percent } from "./text.js";

const BUTTONS = 6, ROWS = 200;
const ENDED = ["finished", "stopped", "failed"];

export const isOver = (run) => ENDED.includes(run.phase);

const RANKS = ["running", "stopping", "waiting", "paused", "queued"];
const rank = (run) => (isOver(run) ? RANKS.length : RANKS.indexOf(run.phase));

/** Runs that train come first, then others that are not over, then the newest. */
const byInterest = (runs) => [...runs].sort((a, b) => rank(a) - rank(b));

/** The run to open if the address names none. */
export const mostInteresting = (runs) => byInterest(runs)[0]?.run;

const go = (run) => { location.hash = new URLSearchParams({ run: run.run }); };

function choice(run, chosen, ...children) {
  const button = el("button", { type: "button" }, ...children);
  if (run.run === chosen) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => go(run));
  return button;
}

function button(run, chosen, now) {
  const best = run.best_accuracy === null ? "" : `, best ${percent(run.best_accuracy)}`;
  const about = `${run.strategy}, ${run.phase}, ${run.rounds_closed} of ${run.num_rounds} ${run.num_rounds === 1 ? "round" : "rounds"}${best}`;
  return el("li", {}, choice(run, chosen, run.run, el("small", {}, `${about}, ${ago(now - run.created_at)}`)));
}

function row(run, chosen, now) {
  const cells = [run.strategy, run.phase, `${run.rounds_closed} of ${run.num_rounds}`, percent(run.best_accuracy)];
  const made = el("tr", run.message ? { title: run.message } : {}, el("td", {}, choice(run, chosen, run.run)));
  made.append(...cells.map((text) => el("td", {}, text)), el("td", { class: "seen" }, ago(now - run.created_at)));
  if (run.run === chosen) made.className = "chosen";
  return made;
}

/** Draw both; `chosen` is the run that the page shows. */
export function drawRuns(runs, chosen, now) {
  const first = byInterest(runs).slice(0, BUTTONS), shown = runs.find((run) => run.run === chosen);
  if (shown && !first.includes(shown)) first.unshift(shown);
  $("runs").replaceChildren(...first.map((run) => button(run, chosen, now)));
  $("all-runs").hidden = runs.length <= BUTTONS;
  $("num-runs").textContent = `All ${runs.length} runs`;
  if (!$("all-runs").open) return;
  const wanted = $("find-run").value.trim().toLowerCase();
  const found = runs.filter((run) => `${run.run} ${run.strategy} ${run.phase} ${run.message}`.toLowerCase().includes(wanted));
  const rows = found.slice(0, ROWS).map((run) => row(run, chosen, now));
  if (found.length > ROWS) rows.push(el("tr", {}, el("td", { colspan: 6 }, `and ${found.length - ROWS} more: search for a name`)));
  document.querySelector("#run-table tbody").replaceChildren(...rows);
}
