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

// errors: [code, status, count, seconds since the last].
export function showErrors(errors) {
  byId("no-errors").hidden = errors.length > 0;
  byId("errors-box").hidden = !errors.length;
  const newest = [...errors].sort((one, other) => one[3] - other[3]).slice(0, MOST_ERRORS);
  fill(
    byId("error-rows"),
    newest.map(([code, status, count, age]) => [
      code,
      [`${status}`, "number"],
      [whole(count), "number"],
      [ago(age), "number"],
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
