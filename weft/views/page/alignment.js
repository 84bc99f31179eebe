/** Which source token each target token came from: the strongest of each row, joined so that the order is seen. */

import { order, strongest } from "./arithmetic.js";
import { make } from "./dom.js";
import { styled } from "./ink.js";
import { sheetOf } from "./matrix.js";
import { count } from "./numbers.js";
import { inkTold, shownNow, whichHeads, wordsTold } from "./shown.js";

/** @param {import("./state.js").State} state */
export function alignmentView(state) {
  const { sheet, told, draw, mark } = sheetOf(state, "alignment");
  const caption = make("p", { class: "caption" });

  /** Forward is one stroke; where the order turns back it is dashed. */
  function path(keys) {
    return (pen, x, y, cell) => {
      const rows = keys.map((key, row) => ({ key, row })).filter(({ key }) => key >= 0);
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      rows.slice(1).forEach(({ key, row }, i) => {
        const from = rows[i];
        pen.strokeStyle = styled("path");
        pen.setLineDash(key < from.key ? [4, 4] : []);
        pen.beginPath();
        pen.moveTo(x(from.key), y(from.row));
        pen.lineTo(x(key), y(row));
        pen.stroke();
      });
      pen.setLineDash([]);
      for (const { key, row } of rows) {
        pen.beginPath();
        pen.arc(x(key), y(row), Math.max(3, Math.min(5, cell / 6)), 0, 7);
        pen.fillStyle = styled("path");
        pen.fill();
        pen.strokeStyle = styled("paper");
        pen.lineWidth = 1.5;
        pen.stroke();
        pen.lineWidth = 2;
      }
    };
  }

  return {
    element: make("div", { class: "view-alignment" }, told, sheet.element, caption),
    mark,
    draw() {
      const shown = shownNow(state);
      const keys = strongest(shown.weights, shown.n, shown.m);
      const { runs, crossings } = order(keys);
      draw(path(keys));
      caption.textContent =
        `${whichHeads(state)}, weights after the softmax; a dot on the strongest source of each target. ` +
        `${count(runs, "monotone run")} (the line never steps back), ${count(crossings, "crossing")} ` +
        `(pairs of targets whose sources stand in the opposite order); dashed where it steps back. ` +
        `${inkTold(state)}${wordsTold(state)}`;
    },
  };
}
