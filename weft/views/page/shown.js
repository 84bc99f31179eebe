/** What the present choice shows: one matrix, its labels, what is pointed at, and the words that say what it is. */

import { distance, entropy } from "./arithmetic.js";
import { count, two } from "./numbers.js";

/**
 * Weights of some layers and heads, averaged.
 *
 * @typedef {{n: number, m: number, weights: Float32Array, closed: Uint8Array|null,
 *            rows: import("./record.js").Units, columns: import("./record.js").Units}} Shown
 */

const KEPT = 64;
const gathered = new Map();

/**
 * The mean over layers and heads, of tokens or of words.
 *
 * @param {import("./record.js").Layer[]} layers of one shape
 * @param {number[]} heads
 * @param {boolean} words
 * @param {string} [key] under which the result is kept
 * @returns {Shown}
 */
export function gather(layers, heads, words, key) {
  const known = key && gathered.get(key);
  if (known) return known;
  const [{ n, m, queries, keys }] = layers;
  const weights = new Float32Array(n * m);
  let closed = layers.every((layer) => layer.closed(0)) ? new Uint8Array(n * m).fill(1) : null;
  for (const layer of layers) {
    for (const head of heads) {
      const part = layer.weights(head);
      const shut = closed && layer.closed(head);
      for (let i = 0; i < part.length; i++) weights[i] += part[i];
      if (closed) for (let i = 0; i < shut.length; i++) closed[i] &= shut[i];
    }
  }
  const parts = layers.length * heads.length;
  if (parts > 1) for (let i = 0; i < weights.length; i++) weights[i] /= parts;
  const shown = folded(weights, closed, queries.units(words), keys.units(words), n, m);
  if (key) {
    if (gathered.size >= KEPT) gathered.delete(gathered.keys().next().value);
    gathered.set(key, shown);
  }
  return shown;
}

/** From pieces to words: summed over the keys' pieces, averaged over the queries'. A cell is closed if all of it is. */
function folded(weights, closed, rows, columns, n, m) {
  if (rows.count === n && columns.count === m) return { n, m, weights, closed, rows, columns };
  const sums = new Float32Array(rows.count * columns.count);
  const shut = closed && new Uint8Array(sums.length).fill(1);
  const pieces = new Array(rows.count).fill(0);
  for (let i = 0; i < n; i++) {
    pieces[rows.of[i]]++;
    for (let j = 0; j < m; j++) {
      const cell = rows.of[i] * columns.count + columns.of[j];
      sums[cell] += weights[i * m + j];
      if (shut) shut[cell] &= closed[i * m + j];
    }
  }
  for (let i = 0; i < rows.count; i++) {
    for (let j = 0; j < columns.count; j++) sums[i * columns.count + j] /= pieces[i];
  }
  return { n: rows.count, m: columns.count, weights: sums, closed: shut, rows, columns };
}

/** The layers that are chosen. @param {import("./state.js").State} state */
export function layersOf(state) {
  return state.layer === null ? state.place.layers : [state.place.layers[state.layer]];
}

/** The heads that are chosen. @param {import("./state.js").State} state */
export function headsOf(state) {
  return state.heads.length ? state.heads : Array.from({ length: layersOf(state)[0].heads }, (_, head) => head);
}

/** The matrix of the present choice. @param {import("./state.js").State} state */
export function shownNow(state) {
  return gather(
    layersOf(state),
    headsOf(state),
    state.words,
    `${state.where} ${state.layer} ${state.heads} ${state.words}`,
  );
}

/** The same of one head alone. @param {import("./state.js").State} state @param {number} head */
export function shownHead(state, head) {
  return gather(layersOf(state), [head], state.words, `${state.where} ${state.layer} ${head} ${state.words}`);
}

/**
 * Which row or column is looked at: the pointed or chosen token as a query, else as a key, else the first query.
 *
 * @param {import("./state.js").State} state
 * @returns {{row: number, column: number, query: import("./record.js").Token, cell: boolean}} −1 for none
 */
export function focused(state) {
  const { record, hover } = state;
  const [layer] = layersOf(state);
  const rows = layer.queries.units(state.words);
  const columns = layer.keys.units(state.words);
  if (hover?.query) {
    return { row: rows.of[hover.query.at], column: columns.of[hover.key.at], query: hover.query, cell: true };
  }
  if (hover?.key)
    return { row: -1, column: columns.of[hover.key.at], query: { list: layer.queries.number, at: 0 }, cell: false };
  for (const token of [hover?.token, state.chosen]) {
    if (!token) continue;
    // A step is what was read before its token came; elsewhere the token itself is meant.
    const isStep = state.view === "steps" && !hover?.token && !state.token;
    const at = isStep
      ? record.rowOfStep(Math.max(state.step, record.prompt), layer)
      : record.same(token, layer.queries);
    if (at >= 0) return { row: rows.of[at], column: -1, query: { list: layer.queries.number, at }, cell: false };
    const key = record.same(token, layer.keys);
    if (key >= 0)
      return { row: -1, column: columns.of[key], query: { list: layer.queries.number, at: 0 }, cell: false };
  }
  return { row: rows.count ? 0 : -1, column: -1, query: { list: layer.queries.number, at: 0 }, cell: false };
}

/** Whether a unit of a list is pointed at, or chosen while nothing is pointed at. */
export function isMarked(state, list, unit) {
  const tokens = state.hover ? [state.hover.token, state.hover.query, state.hover.key] : [state.chosen];
  const { of } = list.units(state.words);
  return tokens.some((token) => token && of[state.record.same(token, list)] === unit);
}

/** "decoder.1.cross, head 3 of 4" and the like. @param {import("./state.js").State} state */
export function whichHeads(state) {
  const layers = layersOf(state);
  const all = layers[0].heads;
  const heads = headsOf(state);
  const calls = layers.length === 1 && state.place.layers.filter((l) => l.module === layers[0].module).length > 1;
  const module =
    layers.length > 1
      ? `mean of all ${layers.length} layers`
      : layers[0].module + (calls ? `, call ${layers[0].call + 1}` : "");
  if (all === 1) return `${module}, one head`;
  if (heads.length === 1) return `${module}, head ${heads[0] + 1} of ${all}`;
  if (heads.length === all) return `${module}, mean of ${count(all, "head")}`;
  return `${module}, mean of heads ${heads.map((head) => head + 1).join(", ")} of ${all}`;
}

/** Entropy and, for self-attention, distance: measured for each head and layer, then averaged. */
export function measures(state) {
  const layers = layersOf(state);
  const heads = headsOf(state);
  const mean = (measure) => {
    let sum = 0;
    for (const layer of layers) for (const head of heads) sum += measure(layer.weights(head), layer.n, layer.m);
    return sum / (layers.length * heads.length);
  };
  const each = layers.length * heads.length > 1 ? ", on average over heads" : "";
  const bits = `Entropy of a row ${two(mean(entropy))} bits${each}`;
  return `${bits}${state.place.self ? `; a token looks ${two(mean(distance))} places away` : ""}.`;
}

/** What words do to weights, if words are shown. @param {import("./state.js").State} state */
export function wordsTold(state) {
  return state.words ? " Words: summed over the pieces of a key, averaged over those of a query." : "";
}

/** What a decoder's rows are, where its tokens are those that it reads. @param {import("./state.js").State} state */
export function readTold(state) {
  return layersOf(state)[0].queries.by
    ? " Tokens here are those that the decoder read; in each row it wrote the one after."
    : "";
}

/**
 * The weight that has full ink in a picture: 1, or where rows spread their weight thinly the median of their largest.
 *
 * @param {Shown} shown
 */
export function fullInk({ weights, n, m }) {
  const peaks = Array.from({ length: n }, (_, i) =>
    weights.subarray(i * m, (i + 1) * m).reduce((a, b) => Math.max(a, b), 0),
  );
  const looking = peaks.filter((peak) => peak > 0).sort((a, b) => a - b);
  const median = looking[Math.floor(looking.length / 2)] ?? 1;
  return median >= 0.5 ? 1 : median;
}

/** @param {import("./state.js").State} state */
export function inkTold(state) {
  const full = fullInk(shownNow(state));
  return full === 1 ? "Full ink is 1." : `Full ink is ${two(full)} and more, the median of the rows' largest weights.`;
}
