/** Attention does not know the order of its tokens: shuffled, they have the same outputs; a mask changes that. */

import { lookUp, shuffled } from "./arithmetic.js";
import { make, makeSvg, tokenText } from "./dom.js";
import { largest, paint } from "./heat.js";
import { tiny } from "./numbers.js";
import { headsOf, layersOf } from "./shown.js";

const PLACE_HIGH = 24; // pixels, as in the style sheet

/**
 * The outputs of a head with its tokens in another order; a mask and a bias stay where they are.
 *
 * @param {import("./record.js").Layer} layer
 * @param {number} head
 * @param {number[]} queries which token stands at each place
 * @param {number[]} keys
 * @param {boolean} open leave the mask and the bias away
 * @returns {number[][]}
 */
export function outputs(layer, head, queries, keys, open) {
  const [closed, bias] = open ? [null, null] : [layer.closed(head), layer.bias(head)];
  const take = (name, order) => {
    const d = layer.width(name);
    const from = layer.vectors(name, head);
    const taken = new Float32Array(order.length * d);
    order.forEach((token, place) => taken.set(from.subarray(token * d, (token + 1) * d), place * d));
    return { d, numbers: taken };
  };
  const [q, k, v] = [take("queries", queries), take("keys", keys), take("values", keys)];
  return queries.map((_, i) => {
    const result = lookUp({
      q: q.numbers.subarray(i * q.d, (i + 1) * q.d),
      keys: k.numbers,
      values: v.numbers,
      scale: layer.scale,
      bias: (j) => (bias ? bias[i * layer.m + j] : 0),
      closed: (j) => Boolean(closed?.[i * layer.m + j]),
    });
    return result.output;
  });
}

/** The largest difference between each row of one and the row `order[i]` of the other. */
export function apart(moved, still, order) {
  return moved.map((row, i) => row.reduce((most, x, c) => Math.max(most, Math.abs(x - still[order[i]][c])), 0));
}

/** @param {import("./state.js").State} state */
export function shuffleView(state) {
  const button = make(
    "button",
    { type: "button", class: "action", onclick: () => state.set({ seed: state.seed + 1 }) },
    "shuffle",
  );
  const how = make("div", { class: "choices", role: "group", "aria-label": "mask" });
  const told = make("p", { class: "shuffle-told" });
  const picture = make("div", {
    class: "scroller shuffle-scroller",
    tabindex: "0",
    "aria-label": "outputs before and after",
  });
  const caption = make("p", { class: "caption" });
  let open = true;

  function draw() {
    const [layer] = layersOf(state);
    const head = headsOf(state)[0];
    how.replaceChildren();
    if (!layer.data.vectors?.values) {
      told.textContent = "Queries, keys and values were not recorded here, so there is nothing to shuffle.";
      picture.replaceChildren();
      caption.textContent = "";
      return;
    }
    const self = state.place.self && layer.n === layer.m;
    const still = Array.from({ length: layer.n }, (_, i) => i);
    const keysStill = Array.from({ length: layer.m }, (_, j) => j);
    const keys = shuffled(layer.m, state.seed);
    const queries = self ? keys : still;
    const compare = (without) => {
      const [before, after] = [
        outputs(layer, head, still, keysStill, without),
        outputs(layer, head, queries, keys, without),
      ];
      return { before, after, rows: apart(after, before, queries) };
    };
    const free = compare(true);
    const bound = layer.closed(head) || layer.bias(head) ? compare(false) : null;
    const what = [layer.closed(head) && "mask", layer.bias(head) && "bias"].filter(Boolean).join(" and ");
    if (bound) how.replaceChildren(mode(true, `without the ${what}`), mode(false, `with the ${what}`));
    const shown = bound && !open ? bound : free;
    const same = self ? "every output is the same row in the new order" : "every output stays the same";
    told.replaceChildren(
      bound
        ? `Without the ${what}: ${same}; largest difference `
        : `${same[0].toUpperCase()}${same.slice(1)}; largest difference `,
      make("strong", { class: "free" }, tiny(Math.max(...free.rows))),
      ...(bound
        ? [
            `. With the ${what}, which ${what.includes("and") ? "stay" : "stays"} at the places and not with the tokens: `,
            make("strong", { class: "bound" }, tiny(Math.max(...bound.rows))),
          ]
        : []),
      ".",
    );
    picture.replaceChildren(drawn(layer, shown, queries));
    const layers = state.layer === null ? ", first layer" : "";
    caption.textContent =
      `${layer.module}${layers}, head ${head + 1}: outputs Σ weight · v, computed in this page from the recorded ` +
      `queries, keys and values, before and after ${self ? "the tokens" : "keys and values"} changed places ` +
      `(seed ${state.seed}). ` +
      "What tells a place and was put into the vectors before (positions added to tokens, rotary turns) moves with " +
      "its token here; this shows the attention alone, not the whole model.";
  }

  function mode(value, label) {
    const choose = () => {
      open = value;
      draw();
    };
    return make(
      "button",
      { type: "button", class: "choice", "aria-pressed": String(open === value), onclick: choose },
      label,
    );
  }

  function drawn(layer, { before, after, rows }, queries) {
    const { labels } = layer.queries;
    const most = Math.max(largest(before.flat()), 1e-9);
    const strip = (values, name) => {
      const canvas = make("canvas", { class: "outputs", role: "img", "aria-label": name });
      paint(canvas, {
        rows: values.length,
        columns: values[0].length,
        value: (i, j) => values[i][j],
        kind: "signed",
        most,
      });
      canvas.style.height = `${values.length * PLACE_HIGH}px`;
      return canvas;
    };
    const names = (order, side) =>
      make(
        "div",
        { class: `shuffle-names ${side}` },
        ...order.map((token, place) =>
          make(
            "span",
            { class: side === "after" && rows[place] > 1e-3 * most ? "differs" : "" },
            tokenText(labels[token]),
          ),
        ),
      );
    const high = labels.length * PLACE_HIGH;
    const links = makeSvg("svg", {
      class: "shuffle-links",
      viewBox: `0 0 100 ${high}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    links.style.height = `${high}px`;
    queries.forEach((token, place) => {
      const [from, to] = [(token + 0.5) * PLACE_HIGH, (place + 0.5) * PLACE_HIGH];
      links.append(
        makeSvg("path", {
          d: `M0 ${from}C50 ${from} 50 ${to} 100 ${to}`,
          class: rows[place] > 1e-3 * most ? "differs" : "",
        }),
      );
    });
    const still = labels.map((_, i) => i);
    return make(
      "div",
      { class: "shuffle" },
      names(still, "before"),
      strip(before, "outputs before"),
      links,
      strip(after, "outputs after"),
      names(queries, "after"),
    );
  }

  return {
    element: make(
      "div",
      { class: "view-shuffle" },
      make("div", { class: "actions" }, button, how),
      told,
      picture,
      caption,
    ),
    draw,
    mark() {},
  };
}
