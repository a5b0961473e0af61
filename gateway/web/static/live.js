// What happens now: a sentence, four figures, the split of the time, and how large batches are.

import { Bar, Tile, peak } from "./charts.js";
import { byId, say } from "./dom.js";
import { count, share, short, tally, time, whole } from "./format.js";
import { History, quantile, sum } from "./history.js";

const STAGES = [
  ["tokenization", "Text to tokens", "tokenize", "gateway_ms_bounds"],
  ["queue", "Wait for a batch", "queue", "ms_bounds"],
  ["step", "Forward", "device", "ms_bounds"],
  ["whole", "Whole request", "whole", "gateway_ms_bounds"],
];
const FEWEST_ROWS = 5;
// What the server is for: while it waits for work, and while it has some.
const WORK = {
  embed: ["turn texts into vectors", "Turning texts into vectors"],
  sparse: ["weigh the words of texts", "Weighing the words of texts"],
  score: ["score texts against a query", "Scoring texts against queries"],
  labels: ["label texts", "Labelling texts"],
};

export class Live {
  constructor() {
    this.history = new History();
    const tiles = byId("tiles");
    this.tokens = new Tile(tiles, "Tokens", "/s");
    this.requests = new Tile(tiles, "Requests", "/s");
    this.waiting = new Tile(tiles, "Waiting", "sequences");
    this.busy = null;
    this.stages = STAGES.map(([, name, kind]) => new Bar(byId("split"), name, 2, kind));
    this.batches = [];
  }

  // A server, perhaps another one than before.
  begin(model) {
    if (this.model?.since !== model.since) this.history = new History(); // a hidden tab comes back to the same one
    this.model = model;
    this.device = model.device.startsWith("cuda") ? "GPU" : "processor";
    this.busy?.root.remove();
    this.busy = new Tile(byId("tiles"), model.replicated ? "Replicas serving" : `${capital(this.device)} busy`, "");
    byId("batch").replaceChildren();
    this.batches = model.seq_bounds.map((bound, index) => {
      const low = index ? model.seq_bounds[index - 1] + 1 : 1;
      return new Bar(byId("batch"), low === bound ? `${bound}` : `${low}–${bound}`, 1, "device");
    });
  }

  add(numbers) {
    this.history.add(numbers);
    this.showTiles();
    this.showStages();
    this.showBatches();
    return this.sentence();
  }

  showTiles() {
    const { history } = this;
    const { last } = history;
    const tokens = history.rates("tokens");
    const requests = history.rates("requests");
    this.tokens.show(short(history.rate("tokens")), `${peak(tokens)} · ${tally(last.tokens)} in all`, tokens);
    this.requests.show(short(history.rate("requests")), `${peak(requests)} · ${tally(last.requests)} in all`, requests);
    const waiting = history.values("waiting_seqs");
    const under = `${count(last.waiting_tokens, "token")} · ${count(last.outstanding, "request")} under way`;
    this.waiting.show(tally(last.waiting_seqs), under, waiting);
    if (last.replicas) this.showReplicas(last.replicas);
    else this.showBusy();
  }

  showBusy() {
    const shares = this.history.rates("busy_ms").map(([s, ms]) => [s, ms / 1000]);
    const under = `${count(this.history.last.running, "batch", "batches")} on it now`;
    this.busy.show(share(Math.min(1, this.history.rate("busy_ms") / 1000)), under, shares, 1);
  }

  showReplicas(replicas) {
    const serving = (list) => list.filter(({ state }) => state === "ready" || state === "half_open").length;
    const values = this.history.values("replicas").map(([s, list]) => [s, serving(list)]);
    this.busy.show(`${serving(replicas)}`, `of ${count(replicas.length, "replica")}`, values, replicas.length);
  }

  showStages() {
    let recent = false;
    const quantiles = STAGES.map(([name, , , bounds]) => {
      const [counts, isRecent] = this.history.counts(name);
      recent ||= isRecent;
      return [0.5, 0.99].map((q) => quantile(this.model[bounds], counts, q));
    });
    const most = Math.max(...quantiles.flat().map(Number)) || 1;
    quantiles.forEach(([p50, p99], index) => this.stages[index].show([time(p50), time(p99)], p50 / most, p99 / most));
    say(byId("split-span"), recent ? "last minute" : "since start");
  }

  showBatches() {
    const [counts, recent] = this.history.counts("batch_seqs");
    const most = Math.max(...counts) || 1;
    const rows = Math.max(FEWEST_ROWS, counts.findLastIndex(Boolean) + 1);
    this.batches.forEach((bar, index) => {
      bar.root.hidden = index >= rows;
      bar.show([tally(counts[index])], counts[index] / most);
    });
    const { last } = this.history;
    const then = recent ? this.history.before(60) : { seqs: 0, tokens: 0, batches: 0 };
    const batches = last.batches - then.batches;
    const mean = (name) => short((last[name] - then[name]) / batches);
    say(byId("batch-note"), batches ? `On average ${mean("seqs")} sequences and ${mean("tokens")} tokens in a batch.` : "No batch yet.");
    say(byId("batch-span"), recent ? "last minute" : "since start");
  }

  // [state, what the server is doing, in words].
  sentence() {
    const { history } = this;
    const { last } = history;
    const requests = history.rate("requests");
    const [can, does] = WORK[this.model.task === "score" && this.model.labels > 1 ? "labels" : this.model.task];
    if (!requests && !last.outstanding) {
      const done = last.requests ? `Nothing to do now, after ${count(last.requests, "request")}.` : "Nobody has asked for anything yet.";
      return ["Idle", `Ready to ${can}. ${done}`];
    }
    const busy = Math.min(1, history.rate("busy_ms") / 1000);
    const device = last.replicas ? "" : `, the ${this.device} busy ${share(busy)} of the time`;
    const waits = last.waiting_seqs ? `${count(last.waiting_seqs, "sequence")} ${last.waiting_seqs === 1 ? "waits" : "wait"}.` : "Nothing waits.";
    const [counts] = history.counts("queue");
    const slow = sum(counts) ? ` Half of all requests start within ${time(quantile(this.model.ms_bounds, counts, 0.5))}.` : "";
    return ["Serving", `${does}: ${short(requests)} requests and ${short(history.rate("tokens"))} tokens a second${device}. ${waits}${slow}`];
  }
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);
