// Formats numbers with units, and makes elements without ever parsing HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** Set the text only if it differs: screen readers read every change aloud. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** An HTML element with attributes and children; text is never parsed as HTML. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The same for SVG. */
export function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 100) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (size >= 1 || size === 0) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  return size >= 1e-3 ? `${(value * 1e3).toFixed(size < 0.01 ? 2 : 1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

/** A time and its limit, in the same unit. */
export function beside(value, limit) {
  const [unit, size, digits] = limit >= 1 ? ["s", 1, 2] : ["ms", 1e-3, limit >= 0.1 ? 0 : 2];
  return `${(value / size).toFixed(digits)} of ${(limit / size).toFixed(digits)} ${unit}`;
}

/** The blocks of a window as text. */
export const blocks = ([end, front]) => (end === front ? `block ${end}` : `blocks ${end}–${front}`);

/** The unit for a number of bytes, and the size of the unit. */
export function unitOf(value) {
  const step = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return [["B", "kB", "MB", "GB", "TB"][step], 1000 ** step];
}

export function bytes(value) {
  const [unit, size] = unitOf(value);
  return `${(value / size).toFixed(size > 1 ? 2 : 0)} ${unit}`;
}

export const percent = (ratio, digits = 1) =>
  ratio === null || ratio === undefined ? "–" : `${(100 * ratio).toFixed(digits)} %`;

export function signed(ratio) {
  const text = `${Math.abs(100 * ratio).toFixed(Math.abs(ratio) < 0.0995 ? 1 : 0)} %`;
  return (ratio < 0 ? "−" : "+") + text;
}

export function ago(age) {
  if (age === null || Number.isNaN(age)) return "–";
  if (age < 90) return `${Math.max(0, Math.round(age))} s ago`;
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  return age < 172800 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
}

/** Colour class of a deviation; the sign shows the same without colour. */
export const verdict = (deviation) => (deviation > 0.2 ? "over" : deviation < -0.1 ? "under" : "near");

/** The blocks of a window as a bar, the input on the left. */
export function windowBar(range, numBlocks) {
  const made = svg("svg", {
    class: "window", viewBox: `0 0 ${numBlocks} 1`, preserveAspectRatio: "none", role: "img",
    "aria-label": range ? `blocks ${range[0]} to ${range[1]} of ${numBlocks}` : "no window",
  });
  const line = (from, to, name) =>
    svg("path", { d: `M${from} .5H${to}`, class: name, "stroke-width": 1, "stroke-dasharray": ".92 .08" });
  made.append(line(0, numBlocks, "track"));
  if (range) made.append(line(range[0] - 1, range[1], "span"));
  return made;
}

/** Time that counts as a bar of up to twice the budget, with a mark at the budget. */
export function budgetBar(deviation) {
  const made = svg("svg", { class: "budget", viewBox: "0 0 200 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  const line = (from, to, name) => svg("path", { d: `M${from} .5H${to}`, class: name, "stroke-width": 1 });
  made.append(line(0, 200, "track"));
  if (deviation !== null) made.append(line(0, Math.min(200, 100 * (1 + deviation)), verdict(deviation)));
  made.append(line(99, 101, "mark"));
  return made;
}
