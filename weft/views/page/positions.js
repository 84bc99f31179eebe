/** The position scheme as a picture: what tells a token where it stands. */

import { unpack } from "./arrays.js";
import { make } from "./dom.js";
import { heatPicture } from "./heat.js";

const TOLD = {
  table:
    "the vector of each position, which is added to the token's: positions across, dimensions down; two hues around 0.",
  angles: "the cosine of the angle by which a pair of dimensions is turned: positions across, pairs down.",
  bias: "what is added to the scores before the softmax, for each head: queries down, keys across; two hues around 0.",
};

/** @param {import("./state.js").State} state */
export function positionsView(state) {
  const pictures = [];
  const sections = state.record.positions.map(({ module, scheme, form, values }) => {
    const numbers = form === "angles" ? unpack(values).map(Math.cos) : unpack(values);
    const drawn = form === "bias" ? heads(values.shape, numbers) : [table(values.shape, numbers, form)];
    pictures.push(...drawn);
    const inside = make(
      "div",
      { class: form === "bias" ? "small-pictures" : "" },
      ...drawn.map(({ element }) => element),
    );
    const told = make("p", { class: "caption" }, `${module || scheme}: ${TOLD[form] ?? "its numbers."}`);
    return make("section", {}, make("h2", {}, scheme || "positions"), inside, told);
  });

  function table([rows, columns], numbers, form) {
    const what = form === "angles" ? "pair" : "dimension";
    return heatPicture({
      name: form === "angles" ? "cosine of the angles" : "vectors",
      rows,
      columns,
      numbers,
      flip: true,
      across: (position) => `position ${position}`,
      down: (dimension) => `${what} ${dimension + 1}`,
      height: Math.min(320, Math.max(96, columns * 4)),
    });
  }

  function heads([count, rows, columns], numbers) {
    const most = numbers.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    return Array.from({ length: count }, (_, head) =>
      heatPicture({
        name: `head ${head + 1}`,
        rows,
        columns,
        numbers: numbers.subarray(head * rows * columns, (head + 1) * rows * columns),
        across: (j) => `key ${j + 1}`,
        down: (i) => `query ${i + 1}`,
        most,
        height: 150,
      }),
    );
  }

  return {
    element: make("div", { class: "view-positions" }, ...sections),
    draw() {
      for (const picture of pictures) picture.draw();
    },
    mark() {},
  };
}
