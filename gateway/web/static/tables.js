// Errors and replicas.

import { byId, make } from "./dom.js";
import { ago, short, tally, whole } from "./format.js";

const MOST_ERRORS = 8;

function fill(body, rows) {
  body.replaceChildren(
    ...rows.map(([first, ...others]) => {
      const cells = others.map(([text, className = ""]) => make("td", { className }, text));
      return make("tr", {}, make("th", { scope: "row" }, first), ...cells);
    }),
  );
}

// errors: [code, status, count, Unix time of the last].
export function showErrors(errors) {
  byId("no-errors").hidden = errors.length > 0;
  byId("errors-box").hidden = !errors.length;
  const newest = [...errors].sort((one, other) => other[3] - one[3]).slice(0, MOST_ERRORS);
  const now = Date.now() / 1000;
  fill(
    byId("error-rows"),
    newest.map(([code, status, count, last]) => [
      code,
      [`${status}`, "number"],
      [whole(count), "number"],
      [ago(now - last), "number"],
    ]),
  );
}

// replicas: null where there are none.
export function showReplicas(replicas) {
  byId("replicas").hidden = !replicas;
  fill(
    byId("replica-rows"),
    (replicas ?? []).map((replica) => [
      replica.name,
      [replica.reason && replica.state !== "ready" ? `${replica.state}: ${replica.reason}` : replica.state, `state-${replica.state}`],
      [short(replica.tokens_per_s), "number"],
      [tally(replica.outstanding_tokens), "number"],
      [tally(replica.tokens), "number"],
      [whole(replica.failures), "number"],
    ]),
  );
}
