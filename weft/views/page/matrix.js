/** One matrix: queries down, keys across, the weight under the pointer told below. */

import { strongest } from "./arithmetic.js";
import { make, sentence } from "./dom.js";
import { two } from "./numbers.js";
import { Sheet } from "./sheet.js";
import { focused, fullInk, inkTold, layersOf, measures, readTold, shownNow, whichHeads, wordsTold } from "./shown.js";

/**
 * A sheet of the present choice that points and chooses, with its line for the weight; alignment draws over it.
 *
 * @param {import("./state.js").State} state
 * @param {string} name
 */
export function sheetOf(state, name) {
  const told = make("output", { class: "readout" }, "\u00a0");
  const tokens = (i, j) => {
    const [layer] = layersOf(state);
    const token = (list, unit) => ({ list: list.number, at: list.units(state.words).first[unit] });
    return { query: i < 0 ? null : token(layer.queries, i), key: j < 0 ? null : token(layer.keys, j) };
  };
  const sheet = new Sheet(
    name,
    (i, j) => {
      const { query, key } = tokens(i, j);
      state.point(query && key ? { query, key } : query ? { token: query } : key ? { key } : null);
    },
    (i, j) => {
      const { query, key } = tokens(i, j);
      if (query ?? key) state.choose(query ?? key);
    },
  );

  function draw(over) {
    const shown = shownNow(state);
    sheet.show({
      n: shown.n,
      m: shown.m,
      rows: shown.rows.labels,
      columns: shown.columns.labels,
      full: fullInk(shown),
      weight: (i, j) => shown.weights[i * shown.m + j],
      closed: (i, j) => Boolean(shown.closed?.[i * shown.m + j]),
      over,
    });
    const { row, column } = focused(state);
    const best = row < 0 ? -1 : strongest(shown.weights.subarray(row * shown.m, (row + 1) * shown.m), 1, shown.m)[0];
    sheet.reveal(row, column < 0 ? best : column);
    mark();
  }

  function mark() {
    const shown = shownNow(state);
    const { row, column, cell } = focused(state);
    sheet.mark(row, column);
    if (!cell) return told.replaceChildren("Point at a cell to read its weight.");
    const at = row * shown.m + column;
    const weight = shown.closed?.[at] ? "may not look there" : two(shown.weights[at]);
    told.replaceChildren(
      ...sentence([{ token: shown.rows.labels[row] }, " → ", { token: shown.columns.labels[column] }, "  "]),
      make("strong", {}, weight),
    );
  }

  return { sheet, told, draw, mark };
}

/** @param {import("./state.js").State} state */
export function matrixView(state) {
  const { sheet, told, draw, mark } = sheetOf(state, "attention matrix");
  const caption = make("p", { class: "caption" });
  return {
    element: make("div", { class: "view-matrix" }, told, sheet.element, caption),
    mark,
    draw() {
      draw();
      const [layer] = layersOf(state);
      const hatched = shownNow(state).closed ? " Hatched: may not look there." : "";
      caption.textContent =
        `${whichHeads(state)}: weights after the softmax, ${layer.queries.name} down, ${layer.keys.name} across. ` +
        `${inkTold(state)}${hatched} ${measures(state)}${readTold(state)}${wordsTold(state)}`;
    },
  };
}
