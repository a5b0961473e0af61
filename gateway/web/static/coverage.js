// The map of CUDA graphs: a grid of tokens by sequences, each cell cold, warmed or captured.

import { byId, make, say } from "./dom.js";
import { brief, count, share, whole } from "./format.js";

const STATES = {
  captured: "captured: replayed as a CUDA graph",
  warmed: "warmed: ran once, captured when it comes again",
  cold: "cold: has not run yet",
  uncapturable: "runs without a graph",
};
const NONE = { state: "cold", replays: 0, steps: 0 };
// So many columns leave room for the hits to stand in the cells.
const ROOMY = 24;
const MOVES = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };

export class Coverage {
  // graphs: null where there are none, as on a CPU.
  begin(graphs) {
    this.cells = new Map();
    byId("graphs").hidden = !graphs;
    byId("map-box").hidden = byId("legend").hidden = !graphs?.max_tokens;
    say(byId("graphs-span"), "");
    if (!graphs?.max_tokens) {
      say(byId("graphs-note"), "Graphs are switched off (--capture off).");
      return;
    }
    this.most = graphs.max_tokens;
    this.draw(graphs);
    this.update(graphs.cells);
  }

  draw({ token_buckets: tokens, sequence_buckets: seqs, cells }) {
    const known = (buckets, index) => [...new Set([...buckets, ...cells.map((cell) => cell[index])])].sort((a, b) => a - b);
    this.columns = known(tokens, 0).filter((bucket) => bucket > 0);
    this.columns.push(0); // all that is larger
    const head = this.columns.map((bucket) => make("th", { scope: "col" }, make("span", { className: isPower(bucket) ? "" : "hidden" }, bucket ? `${bucket}` : `>${this.most}`)));
    const rows = known(seqs, 1).map((bucket) => this.row(bucket));
    const corner = make("th", { scope: "col", className: "corner" }, "sequences ↓\ntokens →");
    const table = make("table", { className: this.columns.length > ROOMY ? "map" : "map roomy", role: "grid", "aria-labelledby": "graphs-title" });
    table.append(make("thead", {}, make("tr", {}, corner, ...head)), make("tbody", {}, ...rows));
    table.addEventListener("keydown", (event) => this.move(event));
    for (const [come, go] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
      table.addEventListener(come, (event) => this.tip(event.target));
      table.addEventListener(go, () => this.tip(null));
    }
    byId("map-box").replaceChildren(table);
    table.querySelector("td.cell").tabIndex = 0;
  }

  row(seqs) {
    const cells = this.columns.map((tokens) => {
      if (tokens && seqs > tokens) return make("td", { className: "void" });
      const td = make("td", { className: "cell", tabIndex: -1 }, make("span", { className: "hits", "aria-hidden": "true" }));
      this.cells.set(`${tokens} ${seqs}`, { td, tokens, seqs, ...NONE });
      this.paint(this.cells.get(`${tokens} ${seqs}`));
      return td;
    });
    return make("tr", {}, make("th", { scope: "row" }, whole(seqs)), ...cells);
  }

  // changed: [tokens, sequences, state, replays, steps] of each.
  update(changed) {
    for (const [tokens, seqs, state, replays, steps] of changed) {
      const cell = this.cells.get(`${tokens} ${seqs}`);
      if (cell) this.paint(Object.assign(cell, { state, replays, steps }));
    }
    this.summarise();
  }

  paint(cell) {
    const { td, tokens, seqs, replays, steps } = cell;
    cell.shown = tokens || !steps ? cell.state : "uncapturable";
    td.dataset.state = cell.shown;
    const size = tokens ? `up to ${whole(tokens)} tokens` : `more than ${whole(this.most)} tokens`;
    const hits = steps ? `${count(steps, "hit")}, ${whole(replays)} by graph` : "no hits";
    cell.words = `${size}, up to ${count(seqs, "sequence")}. ${STATES[cell.shown]}. ${hits}`;
    td.setAttribute("aria-label", cell.words);
    say(td.firstChild, steps ? brief(steps) : "");
  }

  summarise() {
    const cells = [...this.cells.values()];
    const counted = (state) => cells.filter(({ shown }) => shown === state).length;
    byId("legend").replaceChildren(
      ...Object.keys(STATES).map((state) => {
        const swatch = make("span", { className: "swatch", "aria-hidden": "true" });
        swatch.dataset.state = state;
        return make("span", {}, swatch, `${state === "uncapturable" ? "no graph" : state} ${counted(state)}`);
      }),
    );
    const total = (name) => cells.reduce((all, cell) => all + cell[name], 0);
    const steps = total("steps");
    say(byId("graphs-note"), steps ? `${share(total("replays") / steps)} of ${count(steps, "batch", "batches")} were replays of a graph.` : "Each cell is a size of batch. It is captured when it comes the second time.");
    say(byId("graphs-span"), "since start, warm-up included");
  }

  move(event) {
    const step = MOVES[event.key];
    if (event.key === "Escape") this.tip(null);
    if (!step) return;
    event.preventDefault();
    const rows = [...event.currentTarget.tBodies[0].rows];
    let row = rows.indexOf(event.target.parentElement) + step[0];
    let column = event.target.cellIndex + step[1];
    const next = rows[row]?.cells[column];
    if (!next?.classList.contains("cell")) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  tip(node) {
    const tip = byId("tip");
    const td = node?.closest?.("td.cell");
    tip.hidden = !td;
    if (!td) return;
    say(tip, td.getAttribute("aria-label"));
    const [cell, box] = [td.getBoundingClientRect(), byId("graphs").getBoundingClientRect()];
    tip.style.left = `${Math.max(8, Math.min(cell.left - box.left - tip.offsetWidth / 2, box.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${cell.bottom - box.top + 6}px`;
  }
}

const isPower = (bucket) => (bucket & (bucket - 1)) === 0;
