/** Gates: learned numbers between 0 and 1 that let through, time across and units down. */

import { unpack } from "./arrays.js";
import { make } from "./dom.js";
import { heatPicture } from "./heat.js";

/** @param {import("./state.js").State} state */
export function gatesView(state) {
  const { record } = state;
  const pictures = [];
  const sections = record.gates.map(({ module, call, grids, sequence }) => {
    const labels = sequence === undefined ? null : record.lists[sequence].labels;
    const drawn = Object.entries(grids).map(([name, packed]) => {
      const [rows, columns] = packed.shape;
      const alone = rows === 1; // one vector, such as a factor for each channel
      const time = (t) => (labels ? `\u2068${labels[t]}\u2069` : `step ${t + 1}`);
      return heatPicture({
        name,
        rows,
        columns,
        numbers: unpack(packed),
        flip: !alone,
        down: alone ? () => name : (unit) => `unit ${unit + 1}`,
        ticks: (!alone && labels) || [],
        across: alone ? (unit) => `unit ${unit + 1}` : time,
        height: alone ? 32 : Math.min(160, Math.max(48, columns * 4)),
      });
    });
    pictures.push(...drawn);
    return make(
      "section",
      {},
      make("h2", {}, call ? `${module}, call ${call + 1}` : module),
      ...drawn.map(({ element }) => element),
    );
  });
  const caption = make(
    "p",
    { class: "caption" },
    "Gates as the module computed them, not averaged: time across, units down (a factor for each channel stands in " +
      "one row). Full ink is 1; where numbers are negative, two hues around 0.",
  );
  return {
    element: make("div", { class: "view-gates" }, ...sections, caption),
    draw() {
      for (const picture of pictures) picture.draw();
    },
    mark() {},
  };
}
