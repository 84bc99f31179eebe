/** How one head came to its weights for one query, with the numbers that were recorded: q·k, scale, softmax, Σ. */

import { lookUp } from "./arithmetic.js";
import { make, tokenText } from "./dom.js";
import { largest, paintVector, vectorStrip } from "./heat.js";
import { short, tiny, two } from "./numbers.js";
import { headsOf, layersOf } from "./shown.js";

const KEYS = 6; // the likeliest that are listed
const TERMS = 3; // of a product that are written out

/**
 * Everything about one query of one head.
 *
 * @param {import("./record.js").Layer} layer
 * @param {number} head
 * @param {number} at the query's number
 */
export function headNumbers(layer, head, at) {
  const d = layer.width("queries");
  const [bias, closed] = [layer.bias(head), layer.closed(head)];
  const q = layer.vectors("queries", head).subarray(at * d, (at + 1) * d);
  const keys = layer.vectors("keys", head);
  const result = lookUp({
    q,
    keys,
    values: layer.vectors("values", head),
    scale: layer.scale,
    bias: (j) => (bias ? bias[at * layer.m + j] : 0),
    closed: (j) => Boolean(closed?.[at * layer.m + j]),
  });
  const recorded = layer.weights(head).subarray(at * layer.m, (at + 1) * layer.m);
  const difference = Math.max(...result.weights.map((weight, j) => Math.abs(weight - recorded[j])));
  return { ...result, q, keys, d, recorded, difference, bias: bias && bias.subarray(at * layer.m, (at + 1) * layer.m) };
}

/** @param {import("./state.js").State} state */
export function headworkPanel(state) {
  const body = make("div", { class: "headwork" });

  /** @param {import("./record.js").Token} query */
  function show(query) {
    const layers = layersOf(state);
    const heads = headsOf(state);
    if (!layers[0].hasVectors)
      return say("Queries and keys were not recorded here: this attention shows its weights only.");
    if (layers.length > 1) return say("The mean of several layers has no arithmetic of its own: choose a layer (↑ ↓).");
    if (heads.length > 1)
      return say(`The mean of ${heads.length} heads has no arithmetic of its own: choose a head (h).`);
    body.replaceChildren(...steps(layers[0], heads[0], query));
  }

  function say(text) {
    body.replaceChildren(make("p", { class: "quiet" }, text));
  }

  function steps(layer, head, query) {
    const label = layer.queries.labels[query.at];
    const numbers = headNumbers(layer, head, query.at);
    const best = numbers.recorded.reduce((top, weight, j) => (weight > numbers.recorded[top] ? j : top), 0);
    const parts = [
      make("p", {}, "q of ", tokenText(label), ` ${vectorText(numbers.q)}`),
      strip(numbers.q, "query"),
      make(
        "p",
        {},
        "k of ",
        tokenText(layer.keys.labels[best]),
        ` ${vectorText(numbers.keys.subarray(best * numbers.d, (best + 1) * numbers.d))}`,
      ),
      strip(numbers.keys.subarray(best * numbers.d, (best + 1) * numbers.d), "key"),
      make("p", { class: "formula" }, product(numbers, best)),
      table(layer, numbers),
    ];
    if (numbers.output) {
      parts.push(make("p", {}, `Σ weight · v ${vectorText(numbers.output)}`), strip(numbers.output, "output"));
    }
    parts.push(
      make(
        "p",
        { class: "quiet agreement" },
        "Softmax made again here, against the recorded weights: largest difference ",
        make("strong", {}, tiny(numbers.difference)),
        ".",
      ),
    );
    return parts;
  }

  function table(layer, { dots, scores, weights, recorded, bias }) {
    const places = Array.from(recorded.keys())
      .sort((a, b) => recorded[b] - recorded[a])
      .slice(0, KEYS);
    const scaled = `× ${short(layer.scale)}`;
    const heads = ["key", "q·k", scaled, ...(bias ? ["+ bias"] : []), "softmax", "recorded"];
    const rows = places.map((j) => {
      const shut = scores[j] === -Infinity;
      const cells = [
        short(dots[j]),
        shut ? "closed" : short(dots[j] * layer.scale),
        ...(bias ? [shut ? "closed" : short(scores[j])] : []),
        two(weights[j]),
        two(recorded[j]),
      ];
      return make(
        "tr",
        {},
        make("th", { scope: "row" }, tokenText(layer.keys.labels[j])),
        ...cells.map((text) => make("td", {}, text)),
      );
    });
    return make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, ...rows),
    );
  }

  return { element: body, show };
}

/** "[0.12 −0.40 0.93 … ]", with as many numbers as fit a line. @param {ArrayLike<number>} vector */
export function vectorText(vector, shown = TERMS) {
  const first = Array.from(vector).slice(0, shown).map(short).join("  ");
  return `= [ ${first}${vector.length > shown ? " …" : ""} ], ${vector.length} numbers`;
}

function product({ q, keys, d, dots }, j) {
  const terms = Array.from({ length: Math.min(TERMS, d) }, (_, c) => `${short(q[c])}·${bracketed(keys[j * d + c])}`);
  return `q·k = ${terms.join(" + ").replaceAll("+ −", "− ")}${d > TERMS ? " + …" : ""} = ${short(dots[j])}`;
}

function bracketed(x) {
  return x < 0 ? `(${short(x)})` : short(x);
}

function strip(vector, name) {
  const canvas = vectorStrip(name);
  paintVector(canvas, vector, largest(vector));
  return canvas;
}
