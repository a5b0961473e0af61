// What came back, as a heat map of similarities or a ranking.

import { byId, make } from "./dom.js";
import { time, whole } from "./format.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
let repaint = () => {};
// More texts than these want narrower cells.
const ROOMY = 7;
dark.addEventListener("change", () => repaint());

function head(...names) {
  return make("thead", {}, make("tr", {}, ...names.map(([name, className]) => make("th", { scope: "col", className }, name))));
}

// A text may run from right to left: its own start is what is shown of it.
function name(index, text) {
  const words = make("span", { className: "words", dir: "auto", title: text }, text);
  return make("th", { scope: "row", className: "text-name" }, `${index + 1} `, words);
}

// answers: tokens and ms of each text.
export function showSimilarities(texts, vectors, answers) {
  const painted = [];
  const rows = texts.map((text, index) => {
    const cells = vectors.map((other) => {
      const value = cosine(vectors[index], other);
      const cell = make("td", {}, value.toFixed(3).replace("-", "−"));
      painted.push([cell, value]);
      return cell;
    });
    const { tokens, ms } = answers[index];
    return make("tr", {}, name(index, text), ...cells, number(whole(tokens)), number(time(ms)));
  });
  const columns = texts.map((_, index) => [`${index + 1}`, ""]);
  byId("result").className = texts.length > ROOMY ? "dense" : "";
  byId("result").replaceChildren(head(["Text", ""], ...columns, ["Tokens", "number"], ["Time", "number"]), make("tbody", {}, ...rows));
  repaint = () => painted.forEach(([cell, value]) => paint(cell, value));
  repaint();
}

// results: {index, relevance_score}, the best first.
export function showRanks(texts, results) {
  const scores = results.map((result) => result.relevance_score);
  const [most, least] = [Math.max(...scores, 0), Math.min(...scores, 0)];
  const rows = results.map(({ index, relevance_score: score }) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${(100 * (score - least)) / (most - least || 1)}%`;
    const track = make("td", { className: "score", "aria-hidden": "true" }, make("div", {}, bar));
    return make("tr", {}, name(index, texts[index]), track, number(score.toFixed(4).replace("-", "−")));
  });
  byId("result").className = "";
  byId("result").replaceChildren(head(["Text", ""], ["", ""], ["Score", "number"]), make("tbody", {}, ...rows));
}

const number = (text) => make("td", { className: "number" }, text);

function cosine(one, other) {
  let [dot, a, b] = [0, 0, 0];
  one.forEach((value, index) => {
    dot += value * other[index];
    a += value * value;
    b += other[index] * other[index];
  });
  return dot / Math.sqrt(a * b || 1);
}

// Between the theme's two colours by similarity, and in black or white, whichever is easier to read on it.
function paint(cell, value) {
  const style = getComputedStyle(document.documentElement);
  const [cold, hot] = ["--heat-0", "--heat-1"].map((variable) => channels(style.getPropertyValue(variable).trim()));
  const weight = Math.max(0, Math.min(1, value));
  const mixed = cold.map((channel, index) => Math.round(channel + (hot[index] - channel) * weight));
  cell.style.backgroundColor = `rgb(${mixed.join(" ")})`;
  cell.style.color = luminance(mixed) > 0.179 ? "#000" : "#fff";
}

const channels = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));

// Source: WCAG 2.2, relative luminance.
function luminance(rgb) {
  const [red, green, blue] = rgb.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
