// The table of clients, one row each: search, filter, sort, and only as many rows as a person can read.

import { $, ago, beside, blocks, budgetBar, bytes, el, say, seconds, signed, verdict, windowBar } from "./text.js";

const PAGE = 50;
const ORDERS = {
  client: (a, b) => (a.client < b.client ? -1 : 1),
  deviation: (a, b) => (b.deviation ?? -9) - (a.deviation ?? -9),
  seconds: (a, b) => (b.train_seconds ?? 0) - (a.train_seconds ?? 0),
  bytes: (a, b) => b.bytes_up - a.bytes_up,
};
const WORDS = { download: "downloading", train: "training", upload: "uploading", wait: "waiting", done: "done", idle: "idle" };

export class Table {
  constructor(choose) {
    this.rows = new Map();
    this.seen = {};
    this.chosen = "";
    this.numBlocks = 1;
    this.limit = PAGE;
    this.made = new Map();
    this.body = $("clients").tBodies[0];
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) choose(row.dataset.client);
    });
    for (const id of ["search", "show", "sort"]) $(id).addEventListener("input", () => this.draw());
    $("filter").addEventListener("submit", (event) => event.preventDefault());
    $("more").addEventListener("click", () => { this.limit += PAGE; this.draw(); });
  }

  reset(numBlocks) {
    this.rows.clear();
    this.made.clear();
    this.seen = {};
    this.numBlocks = numBlocks;
    this.limit = PAGE;
    this.body.replaceChildren();
  }

  put(rows) {
    for (const row of rows) this.rows.set(row.client, row);
  }

  draw() {
    // A button that moves within the page loses the keyboard's focus, and so does one in a row that is drawn again.
    const focus = document.activeElement;
    const wanted = this.wanted(), shown = wanted.slice(0, this.limit);
    const made = shown.map((row) => this.row(row));
    const now = this.body.children;
    if (made.length !== now.length || made.some((row, i) => row !== now[i])) {
      this.body.replaceChildren(...made);
    }
    if (focus !== document.activeElement && this.body.contains(focus)) focus.focus({ preventScroll: true });
    const all = wanted.length < this.rows.size ? `, ${this.rows.size} in total` : "";
    say($("count"), `${shown.length} of ${wanted.length} clients${all}`);
    $("more").hidden = shown.length >= wanted.length;
  }

  wanted() {
    const text = $("search").value.trim().toLowerCase(), show = $("show").value;
    const keep = (row) =>
      (!text || row.client.toLowerCase().includes(text) || row.device_type.toLowerCase().includes(text)) &&
      (show === "all" || (show === "here" && row.connected) || (show === "away" && !row.connected) ||
        (show === "over" && row.deviation > 0.2) || (show === "failed" && row.problem));
    const bySeen = (a, b) => (this.seen[a.client] ?? 0) - (this.seen[b.client] ?? 0);
    return [...this.rows.values()].filter(keep).sort(ORDERS[$("sort").value] ?? bySeen);
  }

  /** The row of a client; made again only if it changed. */
  row(row) {
    const before = this.made.get(row.client);
    if (before?.source === row) {
      before.element.classList.toggle("chosen", row.client === this.chosen);
      return before.element;
    }
    const element = before?.element ?? el("tr", { "data-client": row.client });
    element.className = (row.connected ? "" : "away ") + (row.client === this.chosen ? "chosen" : "");
    element.replaceChildren(...this.cells(row, before?.element.querySelector("button")));
    this.made.set(row.client, { source: row, element });
    return element;
  }

  cells(row, button) {
    const range = row.window;
    const spent = row.problem ? [el("small", { class: "problem" }, row.problem)] : [budgetBar(row.deviation), el("small", {}, against(row))];
    return [
      el("td", {}, button ?? el("button", { type: "button" }, row.client), el("small", {}, ` ${row.device_type || "unknown device"}`)),
      el("td", { class: row.phase === "lost" ? "phase problem" : "phase" }, row.connected ? WORDS[row.phase] ?? row.phase : "not connected"),
      el("td", { class: "window-cell" }, windowBar(range, this.numBlocks),
        el("small", {}, range ? `${blocks(range)} of ${this.numBlocks}` : "no window")),
      el("td", { class: "budget-cell" }, ...spent),
      el("td", { class: "bytes" }, `${bytes(row.bytes_up)} sent`, el("small", {}, ` ${bytes(row.bytes_down)} received`)),
      el("td", { class: "seen" }, this.age(row.client)),
    ];
  }

  age(client) {
    const seen = this.seen[client];
    return seen === undefined ? "–" : ago(this.clock() - seen);
  }

  /** Update the ages, which change without any event. */
  tick() {
    for (const element of this.body.children) {
      const text = this.age(element.dataset.client);
      if (element.lastChild.textContent !== text) element.lastChild.textContent = text;
    }
  }
}

/** Seconds of a client that count against its budget, the budget, and the deviation. */
export function against(row) {
  const text = el("span", {});
  const spent = row.deviation === null ? row.train_seconds : row.budget_seconds * (1 + row.deviation);
  if (!spent) {
    text.append("not measured yet");
  } else {
    text.append(row.budget_seconds ? `${beside(spent, row.budget_seconds)} ` : seconds(spent));
    if (row.deviation !== null) text.append(el("b", { class: verdict(row.deviation) }, `(${signed(row.deviation)})`));
  }
  return text;
}
