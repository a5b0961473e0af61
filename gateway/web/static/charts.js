// Sparklines and bars. Sizes are set through the object model: the page's policy forbids style attributes.

import { drawing, make, say } from "./dom.js";
import { short } from "./format.js";

const WIDTH = 120;
const HEIGHT = 32;
// Seconds that the width stands for at least; at first there are fewer.
const FEWEST_S = 30;

// A figure with its name, its unit and its last two minutes.
export class Tile {
  constructor(parent, name, unit) {
    this.value = make("span", { className: "figure" }, "–");
    this.under = make("span", { className: "under muted" });
    this.line = drawing("path", { class: "line" });
    this.area = drawing("path", { class: "area" });
    const svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(drawing("line", { class: "base", x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }), this.area, this.line);
    const title = make("h3", {}, name);
    const figure = make("p", {}, this.value, make("span", { className: "unit" }, unit));
    this.root = make("div", { className: "card tile" }, title, figure, svg, this.under);
    parent.append(this.root);
  }

  // points: [second, value], oldest first. most: what reaches the top; not given: the largest.
  show(text, under, points, most = largest(points)) {
    say(this.value, text);
    say(this.under, under);
    const top = most || 1;
    const [first, last] = [points[0]?.[0], points.at(-1)?.[0]];
    const x = (s) => (WIDTH * (1 - (last - s) / Math.max(FEWEST_S, last - first))).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (HEIGHT - 3) * Math.min(1, value / top)).toFixed(1);
    const line = points.length > 1 ? `M${points.map(([s, value]) => `${x(s)} ${y(value)}`).join("L")}` : "";
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", line && `${line}V${HEIGHT}H${x(first)}Z`);
  }
}

// A table's row: a name, a bar, and figures behind it. kind: the bar's colour.
export class Bar {
  constructor(parent, name, figures, kind) {
    this.bar = make("span", { className: `bar ${kind}` });
    this.tail = make("span", { className: `bar tail ${kind}` });
    this.figures = Array.from({ length: figures }, () => make("td", { className: "number" }, "–"));
    const track = make("td", { className: "track", "aria-hidden": "true" }, make("div", {}, this.tail, this.bar));
    this.root = make("tr", {}, make("th", { scope: "row" }, name), track, ...this.figures);
    parent.append(this.root);
  }

  // width, tail: shares of the track.
  show(texts, width, tail = 0) {
    texts.forEach((text, index) => say(this.figures[index], text));
    for (const [bar, share] of [[this.bar, width], [this.tail, tail]]) {
      bar.style.width = `${100 * share}%`;
      bar.style.minWidth = share ? "2px" : "0";
    }
  }
}

const largest = (points) => Math.max(...points.map(([, value]) => value), 0);

export const peak = (points) => `peak ${short(largest(points))} in 2 min`;
