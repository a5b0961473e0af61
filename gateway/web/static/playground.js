// Texts in; similarities or scores, what each cost, and a program that asks the same.

import { byId, make, say } from "./dom.js";
import { count, time, whole } from "./format.js";
import { headers, ask } from "./key.js";
import { showRanks, showSimilarities } from "./results.js";
import { Snippets } from "./snippets.js";

const FEWEST = 2;
const MOST = 10;
const EXAMPLES = {
  embed: ["How do I reset my password?", "I forgot my login details.", "Our office is closed on Sundays.", "Opening hours at the weekend"],
  rank: ["A rose is a flower of a woody plant.", "The ship left the harbour at dawn.", "Roses need sun and good soil."],
};
const QUERY = "What is a rose?";

export class Playground {
  constructor() {
    this.snippets = new Snippets();
    byId("more").addEventListener("click", () => this.add("").focus());
    byId("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
  }

  begin(model) {
    const kind = model.task === "embed" ? "embed" : model.labels === 1 || model.task === "sparse" ? "rank" : null;
    const usable = kind !== null && model.text;
    byId("try-form").hidden = !usable;
    if (this.model?.since !== model.since) byId("try-result").hidden = true; // another server says something else
    say(byId("try-note"), note(model, kind));
    this.model = model;
    if (!usable || this.kind === kind) return;
    this.kind = kind;
    byId("query-box").hidden = kind === "embed";
    byId("query").value = QUERY;
    say(byId("run"), kind === "embed" ? "Compare" : "Rank");
    byId("texts").replaceChildren();
    EXAMPLES[kind].forEach((text) => this.add(text));
  }

  add(text) {
    const field = make("textarea", { rows: 1, value: text, spellcheck: false, dir: "auto" });
    const remove = make("button", { type: "button" }, "Remove");
    const row = make("div", { className: "text" }, make("label"), field, remove);
    remove.addEventListener("click", () => {
      row.remove();
      this.number();
      byId("more").focus();
    });
    byId("texts").append(row);
    this.number();
    return field;
  }

  number() {
    const rows = [...byId("texts").children];
    rows.forEach((row, index) => {
      const [label, field, remove] = row.children;
      field.id = `text-${index + 1}`;
      label.htmlFor = field.id;
      say(label, `Text ${index + 1}`);
      remove.setAttribute("aria-label", `Remove text ${index + 1}`);
      remove.disabled = rows.length <= FEWEST;
    });
    byId("more").disabled = rows.length >= MOST;
  }

  get fields() {
    return [...byId("texts").querySelectorAll("textarea")];
  }

  async run() {
    const texts = this.fields.map((field) => field.value);
    byId("try-error").hidden = true;
    byId("run").disabled = true;
    byId("try-result").classList.add("stale");
    this.fields.forEach((field) => field.removeAttribute("aria-invalid"));
    try {
      await (this.kind === "embed" ? this.compare(texts) : this.rank(byId("query").value, texts));
      byId("try-result").hidden = false;
      byId("result-title").focus();
    } catch (error) {
      byId("try-result").hidden = true;
      byId("try-error").hidden = false;
      say(byId("try-error"), error.message);
      this.fields[error.index]?.setAttribute("aria-invalid", "true");
      this.fields[error.index]?.focus();
    } finally {
      byId("run").disabled = false;
      byId("try-result").classList.remove("stale");
    }
  }

  // One request a text, all at once: only so the server tells what each of them costs.
  async compare(texts) {
    const path = "v1/embeddings";
    refuseEmpty(texts);
    const answers = await Promise.all(texts.map((input, index) => post(path, { model: this.model.model, input }).catch(of(index))));
    const vectors = answers.map(({ value }) => value.data[0].embedding);
    showSimilarities(texts, vectors, answers);
    say(byId("result-title"), "Cosine similarity");
    say(byId("result-note"), `Each text was a request of its own, all sent at once: ${count(sum(answers), "token")}. The programs below send all texts in one request.`);
    this.snippets.show(path, { model: this.model.model, input: texts });
  }

  async rank(query, documents) {
    const path = "v1/rerank";
    const body = { model: this.model.model, query, documents };
    refuseEmpty(documents);
    const answer = await post(path, body);
    showRanks(documents, answer.value.results);
    say(byId("result-title"), "Best first");
    say(byId("result-note"), `One request: ${count(answer.tokens, "token")} in ${time(answer.ms)}.`);
    this.snippets.show(path, body);
  }
}

function note(model, kind) {
  if (!model.text) return "This server has no tokenizer: it takes token ids and no text, so there is nothing to type here. The API page says how ids are sent.";
  if (kind === null) return `This model gives ${whole(model.labels)} labels: ask it at /predict.`;
  if (kind === "rank") return `Type a query and ${FEWEST} to ${MOST} texts: the model says how well each answers it.`;
  return `Type ${FEWEST} to ${MOST} texts: the model says how alike they are.`;
}

const sum = (answers) => answers.reduce((total, { tokens }) => total + tokens, 0);

// An error that names its text, and knows its place.
function of(index) {
  return (error) => {
    throw Object.assign(new Error(`Text ${index + 1}: ${error.message}`), { index });
  };
}

function refuseEmpty(texts) {
  const index = texts.indexOf("");
  if (index >= 0) of(index)(new Error("there is nothing in it."));
}

async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
  }).catch(() => {
    throw new Error("The server does not answer.");
  });
  const value = await answer.json();
  if (answer.status === 401) ask(true);
  if (!answer.ok) throw new Error(value.error?.message ?? value.detail ?? `The server answered with status ${answer.status}.`);
  const number = (name) => Number(answer.headers.get(name));
  return { value, tokens: number("x-compute-tokens"), ms: number("x-total-time") };
}
