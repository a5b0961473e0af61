// Wires the page: one stream of events, and the parts that show it.

import { Coverage } from "./coverage.js";
import { byId, say } from "./dom.js";
import { whole } from "./format.js";
import { ask, onKey } from "./key.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { Stream } from "./stream.js";
import { showErrors, showReplicas } from "./tables.js";

const STATES = {
  lost: ["No connection", "The server does not answer. This page tries again by itself."],
  key: ["Key wanted", "Numbers and playground want an API key."],
  crowded: ["Too many watch", "As many pages as the server allows watch it already. This one tries again by itself."],
  closing: ["Not ready", "This page tries again by itself."],
};

const live = new Live();
const coverage = new Coverage();
const playground = new Playground();

// Only changes of the state are announced, not every number.
function showState(name, words) {
  say(byId("state"), name);
  byId("state").dataset.state = name.toLowerCase().replaceAll(" ", "-");
  say(byId("lead"), words);
}

function begin(model) {
  byId("try-link").hidden = false;
  live.begin(model);
  coverage.begin(model.graphs);
  playground.begin(model);
  byId("board").hidden = false;
  const kind = model.task === "score" ? `${model.labels} label${model.labels === 1 ? "" : "s"}` : `${whole(model.dimensions)} dimensions`;
  say(byId("model"), `${model.model} · ${kind} · ${model.dtype} on ${model.device} · up to ${whole(model.max_tokens)} tokens`);
  document.title = `${model.model} · Bouquet`;
}

function onEvent(name, value) {
  if (name === "model") {
    begin(value);
    return;
  }
  showState(...live.add(value));
  if (value.cells) coverage.update(value.cells);
  showErrors(value.errors);
  showReplicas(value.replicas);
}

// why: what the server says of itself, as "the model is still loading".
function onState(state, why) {
  if (state === "key") ask(true);
  const [name, words] = STATES[state] ?? [];
  if (name) showState(name, why ? `${why[0].toUpperCase()}${why.slice(1)}. ${words}` : words);
  byId("board").classList.toggle("stale", state !== "open");
}

const stream = new Stream("dashboard/events", onEvent, onState);
onKey(() => stream.open());
// Nobody looks at a hidden tab, so nothing is sent to it.
document.addEventListener("visibilitychange", () => (document.hidden ? stream.close() : stream.open()));
stream.open();
