/** All layers and heads at a glance: one small picture each, drawn when it comes into sight. */

import { entropy } from "./arithmetic.js";
import { make } from "./dom.js";
import { paint } from "./heat.js";
import { two } from "./numbers.js";
import { fullInk, gather } from "./shown.js";

/** @param {import("./state.js").State} state */
export function gridView(state) {
  const rows = make("div", { class: "grid" });
  const caption = make("p", { class: "caption" });
  /** @type {Map<Element, {layer: number, head: number}>} */
  let cells = new Map();
  let built = "";
  const sight = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        sight.unobserve(target);
        requestAnimationFrame(() => cells.has(target) && fill(target));
      }
    },
    { rootMargin: "120px" },
  );

  function fill(button) {
    const { layer, head } = cells.get(button);
    const shown = gather([state.place.layers[layer]], [head], state.words);
    const { n, m, weights, closed } = shown;
    paint(button.querySelector("canvas"), {
      rows: n,
      columns: m,
      value: (i, j) => weights[i * m + j],
      closed: closed ? (i, j) => closed[i * m + j] === 1 : undefined,
      kind: "weight",
      most: fullInk(shown),
    });
    button.title = `layer ${layer + 1}, head ${head + 1}: entropy of a row ${two(entropy(weights, n, m))} bits`;
    button.classList.add("drawn");
  }

  function build() {
    cells = new Map();
    rows.replaceChildren(
      ...state.place.layers.map((layer, number) => {
        const thumbs = Array.from({ length: layer.heads }, (_, head) => {
          const button = make(
            "button",
            {
              type: "button",
              class: "thumb",
              "aria-label": `layer ${number + 1}, head ${head + 1}: enlarge`,
              onclick: () => state.set({ layer: number, heads: [head], view: "matrix" }),
            },
            make("canvas", { "aria-hidden": "true" }),
          );
          cells.set(button, { layer: number, head });
          sight.observe(button);
          return button;
        });
        const row = make("div", { class: "thumbs" }, ...thumbs);
        return make("div", { class: "grid-row" }, make("span", { class: "quiet grid-name" }, String(number + 1)), row);
      }),
    );
    const heads = make(
      "div",
      { class: "thumbs" },
      ...Array.from({ length: state.place.heads }, (_, head) => make("span", { class: "quiet" }, String(head + 1))),
    );
    rows.prepend(
      make(
        "div",
        { class: "grid-row grid-heads", "aria-hidden": "true" },
        make("span", { class: "quiet grid-name" }),
        heads,
      ),
    );
  }

  function draw() {
    const wanted = `${state.where} ${state.words} ${document.documentElement.dataset.drawn}`;
    if (wanted !== built) {
      sight.disconnect();
      build();
      built = wanted;
    }
    for (const [button, { layer, head }] of cells) {
      const on = (state.layer === null || layer === state.layer) && (!state.heads.length || state.heads.includes(head));
      button.classList.toggle("chosen", on);
    }
    const { place } = state;
    const hatched = place.layers.some((layer) => layer.data.allowed) ? " Hatched: may not look there." : "";
    caption.textContent =
      `${place.name}: every layer (down) and head (across), weights after the softmax, each in its own ink (that of ` +
      `the matrix it enlarges to); queries down, keys across.${hatched} Choose one to enlarge it.`;
  }

  return {
    element: make("div", { class: "view-grid" }, make("div", { class: "scroller" }, rows), caption),
    draw,
    mark() {},
  };
}
