// Programs that ask what was just asked. Where a key is in use they name its variable, never the key.

import { byId, make } from "./dom.js";
import { known } from "./key.js";

const KINDS = [
  ["curl", curl],
  ["Python (openai)", openai],
  ["Python (msgpack)", msgpack],
];

export class Snippets {
  constructor() {
    this.tabs = KINDS.map(([name], index) => {
      const tab = make("button", { type: "button", role: "tab", id: `tab-${index}`, "aria-controls": "code" }, name);
      tab.addEventListener("click", () => this.select(index));
      return tab;
    });
    byId("tabs").append(...this.tabs);
    byId("tabs").addEventListener("keydown", (event) => this.move(event));
    byId("copy").addEventListener("click", () => this.copy());
    this.chosen = 0;
  }

  // path: of the API, relative to the page. body: of the request.
  show(path, body) {
    this.url = new URL(path, document.baseURI).href;
    this.body = body;
    this.tabs[1].hidden = !body.input; // the library knows no ranking
    if (this.tabs[this.chosen].hidden) this.chosen = 0;
    this.select(this.chosen);
  }

  select(index) {
    this.chosen = index;
    this.tabs.forEach((tab, place) => {
      tab.setAttribute("aria-selected", place === index);
      tab.tabIndex = place === index ? 0 : -1;
    });
    byId("code").setAttribute("aria-labelledby", `tab-${index}`);
    byId("code").querySelector("pre").textContent = KINDS[index][1](this.url, this.body);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const open = KINDS.map((_, index) => index).filter((index) => !this.tabs[index].hidden);
    const next = open.at((open.indexOf(this.chosen) + step) % open.length);
    this.select(next);
    this.tabs[next].focus();
  }

  async copy() {
    const pre = byId("code").querySelector("pre");
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      getSelection().selectAllChildren(pre); // over plain HTTP there is no clipboard, but the old command
      document.execCommand("copy");
    }
    byId("copy").textContent = "Copied";
    setTimeout(() => (byId("copy").textContent = "Copy"), 2000);
  }
}

function curl(url, body) {
  const quoted = `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  const key = known() ? '  -H "Authorization: Bearer $API_KEY" \\\n' : "";
  return `curl -s ${url} \\\n${key}  -H 'Content-Type: application/json' \\\n  -d ${quoted}\n`;
}

// A string of JSON is one of Python, too.
function openai(url, { model, input }) {
  const texts = input.map((text) => `    ${JSON.stringify(text)},\n`).join("");
  const base = url.slice(0, -"/embeddings".length);
  return `${known() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}", api_key=${known() ? 'os.environ["API_KEY"]' : '"none"'})
texts = [
${texts}]
answer = client.embeddings.create(model=${JSON.stringify(model)}, input=texts)
for text, item in zip(texts, answer.data):
    print(text, item.embedding[:4])
`;
}

function msgpack(url, body) {
  const fields = Object.entries(body).map(([name, value]) => `    "${name}": ${JSON.stringify(value)},\n`).join("");
  const shown = body.input
    ? 'vectors = np.frombuffer(answer["embeddings"], "<f4").reshape(answer["shape"])\nprint(vectors @ vectors.T)'
    : 'for result in answer["results"]:\n    print(result["index"], result["relevance_score"])';
  const key = known() ? '    "Authorization": "Bearer " + os.environ["API_KEY"],\n' : "";
  return `${key && "import os\n"}from urllib.request import Request, urlopen

import msgspec
${body.input ? "import numpy as np\n" : ""}
body = {
${fields}}
headers = {
    "Content-Type": "application/msgpack",
${key}}
request = Request("${url}", msgspec.msgpack.encode(body), headers)
answer = msgspec.msgpack.decode(urlopen(request).read())
${shown}
`;
}
