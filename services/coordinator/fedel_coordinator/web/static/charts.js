// Charts as plain SVG, as wide as the page allows.

import { svg } from "./text.js";

const LEFT = 46, RIGHT = 10, TOP = 22, BOTTOM = 34;
const MAP_HEIGHT = 360, LABELS = 110;

/** Round numbers within a range, for an axis. */
export function ticks(low, high, wanted = 4) {
  const span = high - low || 1, rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function axes(chart, { x, y, xName, yName, whole = false }) {
  const width = chart.clientWidth || 300, height = chart.clientHeight || 190;
  const px = (v) => LEFT + ((v - x[0]) / (x[1] - x[0] || 1)) * (width - LEFT - RIGHT);
  const py = (v) => height - BOTTOM - ((v - y[0]) / (y[1] - y[0] || 1)) * (height - TOP - BOTTOM);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const parts = [];
  for (const v of ticks(...y)) {
    parts.push(svg("path", { d: `M${LEFT} ${py(v)}H${width - RIGHT}`, class: "grid" }));
    parts.push(svg("text", { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end" }, String(v)));
  }
  for (const v of ticks(...x, Math.max(2, Math.floor(width / 90))).filter((v) => !whole || Number.isInteger(v)))
    parts.push(svg("text", { x: px(v), y: height - BOTTOM + 15, "text-anchor": "middle" }, String(v)));
  parts.push(svg("text", { x: width - RIGHT, y: height - 4, "text-anchor": "end" }, xName));
  parts.push(svg("text", { x: 0, y: 10 }, yName));
  chart.replaceChildren(...parts);
  return [px, py];
}

const extent = (values, floor) => [Math.min(floor, ...values), Math.max(floor + 1e-9, ...values)];

/** Lines of points [x, y] above zero; `x` is the range of the x axis, if the points do not define it. */
export function lines(chart, { series, xName, yName, whole, x }) {
  const points = series.flatMap((s) => s.points);
  if (!points.length) return nothing(chart, "no round yet");
  const [px, py] = axes(chart, {
    x: x ?? extent(points.map((p) => p[0]), 0), y: extent(points.map((p) => p[1]), 0), xName, yName, whole,
  });
  for (const { points: mine, name, label, dots } of series) {
    if (!mine.length) continue;
    const path = svg("path", { d: "M" + mine.map((p) => `${px(p[0]).toFixed(1)} ${py(p[1]).toFixed(1)}`).join("L"), class: name });
    path.append(svg("title", {}, label));
    chart.append(path);
    if (dots || mine.length === 1) for (const p of mine) chart.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 2.5, class: "dot" }));
  }
  chart.setAttribute("aria-label", describe(series, yName));
}

/** A chart without data. */
function nothing(chart, why) {
  const width = chart.clientWidth || 300, height = chart.clientHeight || 100;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("aria-label", why);
  chart.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, why));
}

function describe(series, unit) {
  return series
    .filter((s) => s.points.length)
    .map((s) => `${s.label}: last value ${s.points.at(-1)[1].toPrecision(3)} (${unit})`)
    .join("; ") || "no data yet";
}

/** A client's window [end, front] in each round: one column per round, block 1 at the bottom. */
export function windows(chart, history, numBlocks) {
  if (!history.length) return nothing(chart, "no round yet");
  const rounds = history.map((h) => h.round);
  const [first, last] = rounds.length ? [rounds[0], rounds.at(-1)] : [0, 0];
  const [px, py] = axes(chart, { x: [first - 0.5, last + 0.5], y: [0, numBlocks], xName: "round", yName: "block", whole: true });
  const shown = history.filter((h) => h.window);
  const wide = Math.max(1, px(1) - px(0) - 1);
  const cells = shown.map(({ round, window: [end, front] }) =>
    `M${(px(round) - wide / 2).toFixed(1)} ${py(front).toFixed(1)}h${wide.toFixed(1)}V${py(end - 1).toFixed(1)}h${(-wide).toFixed(1)}z`);
  chart.append(svg("path", { d: cells.join(""), class: "cells" }));
  const now = shown.at(-1);
  chart.setAttribute("aria-label", now ? `round ${now.round}: blocks ${now.window[0]} to ${now.window[1]} of ${numBlocks}` : "no window");
}

const PHASES = ["download", "probe", "train", "wait", "upload"];

/** A client's seconds in each round, one phase on top of the other; T_th as a dashed line. */
export function phases(chart, history) {
  if (!history.length) return nothing(chart, "no round yet");
  const spent = history.map((h) => (Object.keys(h.phases).length ? h.phases : { train: h.train_seconds }));
  const [first, last] = history.length ? [history[0].round, history.at(-1).round] : [0, 0];
  const total = (of) => Object.values(of).reduce((a, b) => a + b, 0);
  const [px, py] = axes(chart, {
    x: [first - 0.5, last + 0.5], y: extent([...spent.map(total), ...history.map((h) => h.budget_seconds)], 0), xName: "round", yName: "seconds", whole: true,
  });
  const wide = Math.max(1, Math.min(40, px(1) - px(0) - 1)), below = history.map(() => 0);
  for (const phase of PHASES) {
    const bars = history.map(({ round }, i) => {
      const from = below[i], to = (below[i] += spent[i][phase] ?? 0);
      return `M${(px(round) - wide / 2).toFixed(1)} ${py(to).toFixed(1)}h${wide.toFixed(1)}V${py(from).toFixed(1)}h${(-wide).toFixed(1)}z`;
    });
    const path = svg("path", { d: bars.join(""), class: `phase ${phase}` });
    path.append(svg("title", {}, phase));
    chart.append(path);
  }
  const limit = history.map((h) => `M${(px(h.round) - wide / 2).toFixed(1)} ${py(h.budget_seconds).toFixed(1)}h${wide.toFixed(1)}`);
  chart.append(svg("path", { d: limit.join(""), class: "limit" }));
  const now = spent.at(-1);
  chart.setAttribute("aria-label", now ? `round ${last}: ${PHASES.filter((p) => now[p]).map((p) => `${p} ${now[p].toPrecision(2)} s`).join(", ")}` : "no data yet");
}

/** Rounds against tensors; `columns` are [round, level of each tensor from 0 to 1]. */
export function tensorMap(chart, tensors, columns, tell) {
  const width = chart.clientWidth || 300;
  const labels = Math.min(LABELS, width / 4);
  const high = Math.max(2, Math.min(14, MAP_HEIGHT / tensors.length)), height = high * tensors.length;
  const shown = columns.slice(-Math.floor((width - labels) / 3));
  const wide = Math.min(18, (width - labels) / Math.max(1, shown.length));
  chart.setAttribute("viewBox", `0 0 ${width} ${height + 18}`);
  chart.replaceChildren(...blockLines(tensors, labels, width, high));
  for (let level = 1; level <= 5; level++) {
    const cells = [];
    shown.forEach(([, levels], i) => levels.forEach((value, t) => {
      if (Math.ceil(value * 5) === level)
        cells.push(`M${(labels + i * wide).toFixed(1)} ${(t * high).toFixed(1)}h${(wide * 0.9).toFixed(1)}v${(high * 0.9).toFixed(1)}h${(-wide * 0.9).toFixed(1)}z`);
    }));
    if (cells.length) chart.append(svg("path", { d: cells.join(""), class: "cells", opacity: 0.15 + 0.17 * level }));
  }
  shown.forEach(([round], i) => {
    if (i === 0 || i === shown.length - 1) {
      const end = i > 0 && labels + (i + 1) * wide > width - 20;
      chart.append(svg("text", { x: labels + (end ? (i + 1) * wide : i * wide), y: height + 13, "text-anchor": end ? "end" : "start" }, i ? String(round) : `round ${round}`));
    }
  });
  chart.setAttribute("aria-label", `${tensors.length} tensors, ${shown.length} rounds`);
  chart.onpointermove = (event) => {
    const box = chart.getBoundingClientRect(), scale = width / box.width;
    const column = shown[Math.floor(((event.clientX - box.left) * scale - labels) / wide)];
    const tensor = tensors[Math.floor(((event.clientY - box.top) * scale) / high)];
    if (column && tensor) tell(column[0], tensor, column[1][tensors.indexOf(tensor)]);
  };
}

function blockLines(tensors, labels, width, high) {
  const parts = [];
  let lastText = -20;
  tensors.forEach((tensor, t) => {
    if (t && tensors[t - 1].block === tensor.block) return;
    parts.push(svg("path", { d: `M0 ${(t * high).toFixed(1)}H${width}`, class: "grid" }));
    if (t * high - lastText < 11) return;
    lastText = t * high;
    parts.push(svg("text", { x: 0, y: t * high + 10 }, `block ${tensor.block}`));
  });
  return parts;
}
