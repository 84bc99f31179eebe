/**
 * The record behind the page: lists of tokens, and attention by place (encoder self, cross, …), layer and head.
 *
 * A token is told by its list and its number there; `same` knows that a decoder reads what it wrote one step before.
 *
 * @typedef {{list: number, at: number}} Token
 */

import { unpack, unpackClosed } from "./arrays.js";

/**
 * What stands for a token in a view: the token itself, or the word that it is a piece of.
 *
 * @typedef {{labels: string[], starts: boolean[], of: number[], first: number[], count: number}} Units
 */

/** A list of tokens. */
export class TokenList {
  constructor(number, { name, labels, starts, words, like, by }) {
    this.number = number;
    this.name = name;
    this.labels = labels.map((label) => (label.trim() ? label : "∅"));
    this.starts = starts.map(Boolean);
    this.words = words ?? null;
    /** The list of which this is the beginning, moved by so many places. */
    this.like = like ?? null;
    this.by = by ?? 0;
    this.pieces = unitsOf(
      this,
      this.labels.map((_, i) => i),
    );
    this.wholes = this.words ? unitsOf(this, this.words) : this.pieces;
  }

  get count() {
    return this.labels.length;
  }

  /** @param {boolean} words @returns {Units} */
  units(words) {
    return words ? this.wholes : this.pieces;
  }
}

/** @returns {Units} */
function unitsOf(list, numbers) {
  const units = { labels: [], starts: [], of: [], first: [], count: 0 };
  numbers.forEach((number, i) => {
    if (i === 0 || number !== numbers[i - 1]) {
      units.labels.push("");
      units.starts.push(list.starts[i]);
      units.first.push(i);
      units.count++;
    }
    units.labels[units.count - 1] += list.labels[i];
    units.of.push(units.count - 1);
  });
  return units;
}

/** One recorded call of one attention module; arrays are read when first asked for. */
export class Layer {
  constructor(data, lists) {
    this.data = data;
    this.module = data.module;
    this.call = data.call;
    [this.heads, this.n, this.m] = data.weights.shape;
    this.queries = lists[data.queries];
    this.keys = lists[data.keys];
    this.read = new Map();
  }

  get hasVectors() {
    return Boolean(this.data.vectors);
  }

  get scale() {
    return this.data.scale;
  }

  /** Weights of a head [n × m]. @param {number} head @returns {Float32Array} */
  weights(head) {
    return this.part("weights", this.data.weights, head, unpack);
  }

  /** 1 where a query may not look [n × m], or null if it may look everywhere. @param {number} head */
  closed(head) {
    return this.data.allowed ? this.part("closed", this.data.allowed, head, unpackClosed) : null;
  }

  /** What is added to the scaled scores of a head [n × m], or null. @param {number} head */
  bias(head) {
    return this.data.bias ? this.part("bias", this.data.bias, head, unpack) : null;
  }

  /** Vectors of a head [tokens × d]: "queries", "keys" or "values"; null if they were not recorded. */
  vectors(name, head) {
    const packed = this.data.vectors?.[name];
    return packed ? this.part(name, packed, Math.floor((head * packed.shape[0]) / this.heads), unpack) : null;
  }

  /** The width d of queries and keys, or of values. @param {string} name */
  width(name) {
    return this.data.vectors[name].shape[2];
  }

  part(name, packed, head, how) {
    if (!this.read.has(name)) this.read.set(name, how(packed));
    const [count, rows, columns] = packed.shape;
    const begin = Math.min(head, count - 1) * rows * columns;
    return this.read.get(name).subarray(begin, begin + rows * columns);
  }
}

/** Where was looked: all layers of one role. */
export class Place {
  constructor({ name, layers }, lists) {
    this.name = name;
    this.layers = layers.map((layer) => new Layer(layer, lists));
    const [first] = this.layers;
    this.heads = Math.max(...this.layers.map((layer) => layer.heads));
    // Layers of one shape over the same tokens have a mean.
    this.even = this.layers.every(
      (l) => l.heads === first.heads && l.queries === first.queries && l.keys === first.keys,
    );
    this.self = first.queries === first.keys || first.keys.like === first.queries.number;
    this.cross = name === "cross" || (!this.self && first.keys.name === "source");
  }
}

/** Everything. */
export class PageRecord {
  constructor(json) {
    Object.assign(this, { about: json.about, gates: json.gates, positions: json.positions, walk: json.walk });
    this.lists = json.sequences.map((list, number) => new TokenList(number, list));
    this.places = json.places.map((place) => new Place(place, this.lists));
    this.search = json.about.search ?? null;
    this.hasWords = this.lists.some((list) => list.words);
    const named = this.lists.filter((list) => list.like === null && ["source", "target", "text"].includes(list.name));
    const last = this.places[0]?.layers.at(-1);
    /** The lists that the sentence bar shows; without names those of the last call, which saw most. */
    this.bar = named.length || !last ? named : [...new Set([last.keys, last.queries])];
    /** The list whose tokens are the steps. */
    this.main = this.bar.at(-1) ?? new TokenList(0, { name: "", labels: [], starts: [] });
    /** The token of that list that the search found first: those before it are a prompt. */
    this.prompt = this.main.name === "target" ? 0 : (this.search?.first ?? -1) + 1;
  }

  /** The number that a token has in a list, −1 if it is not there. @param {Token} token @param {TokenList} list */
  same(token, list) {
    const mine = this.lists[token.list];
    let at = -1;
    if (list === mine) at = token.at;
    else if (list.like === token.list) at = token.at + list.by;
    else if (mine.like === list.number) at = token.at - mine.by;
    return at < list.count ? at : -1;
  }

  /** The row of a layer in which the token of a step was found, −1 if there is none: it had read all before. */
  rowOfStep(step, layer) {
    if (layer.queries !== this.main && layer.queries.like !== this.main.number) return -1;
    const row = this.main.name === "target" ? step : step - 1;
    return row < layer.n ? row : -1;
  }
}
