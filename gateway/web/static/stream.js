// Server-sent events over fetch, which, unlike EventSource, can send a key.

import { headers } from "./key.js";

const FIRST_RETRY_S = 1;
const LAST_RETRY_S = 15;

export class Stream {
  // onEvent(name, value) for each event; onState(state, why) with "open", "lost", "key", "crowded" or "closing",
  // of which the last has the server's own words.
  constructor(url, onEvent, onState) {
    Object.assign(this, { url, onEvent, onState });
    this.retryS = FIRST_RETRY_S;
    this.abort = null;
  }

  // Begin, or begin again.
  open() {
    this.close();
    const abort = (this.abort = new AbortController());
    this.read(abort.signal).then(
      (state) => this.ended(abort, ...state),
      () => this.ended(abort, "lost"),
    );
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  ended(abort, state, why) {
    if (this.abort !== abort) return; // closed on purpose
    this.onState(state, why);
    if (state === "key") return; // there is nothing to try until there is another one
    this.timer = setTimeout(() => this.open(), this.retryS * 1000);
    this.retryS = Math.min(LAST_RETRY_S, this.retryS * 2);
  }

  async read(signal) {
    const answer = await fetch(this.url, { headers: headers(), signal, cache: "no-store" });
    if (answer.status === 401) return ["key"];
    if (answer.status === 429) return ["crowded"];
    if (!answer.ok) return ["closing", (await answer.json()).error.message];
    this.retryS = FIRST_RETRY_S;
    this.onState("open");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return ["lost"];
      const events = (text + value).split("\n\n");
      text = events.pop();
      events.forEach((event) => this.tell(event));
    }
  }

  tell(event) {
    const [, name, value] = event.match(/^event: (\w+)\ndata: (.*)$/);
    this.onEvent(name, JSON.parse(value));
  }
}
