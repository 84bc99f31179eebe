/** The search as a tree: a column a step, a row a beam; the way that was taken is strong. */

import { make, makeSvg } from "./dom.js";
import { inkOf } from "./ink.js";
import { share, two } from "./numbers.js";

const WIDE = 104;
const HIGH = 44;
const TOP = 30;
const LETTERS = 9;

/** @param {import("./state.js").State} state */
export function beamTree(state) {
  const { prompt, search } = state.record;
  const { steps } = search;
  const most = Math.max(1, ...steps.map((step) => step.length));
  const [wide, high] = [steps.length * WIDE + 16, TOP + most * HIGH + 4];
  const now = makeSvg("rect", { class: "beam-now", y: 0, width: WIDE, height: high, rx: 4 });
  const svg = makeSvg(
    "svg",
    { class: "beams", width: wide, height: high, role: "img", "aria-label": "the beams of the search as a tree" },
    now,
  );
  const scroller = make(
    "div",
    { class: "scroller beams-scroller", tabindex: "0", "aria-label": "beams, scrolls" },
    svg,
  );
  const x = (step) => step * WIDE + 16;
  const places = steps.map((step) => new Map(step.map((beam, i) => [beam.row, i])));
  const y = (place) => TOP + place * HIGH + 28;
  const dots = [];

  steps.forEach((step, t) => {
    svg.append(makeSvg("text", { class: "beam-step", x: x(t) - 6, y: 16 }, String(t + 1)));
    step.forEach((beam, place) => {
      if (t === 0 || beam.parent < 0 || !places[t - 1].has(beam.parent)) return;
      const [from, to] = [x(t - 1) + 5, x(t) - 5];
      const [a, b] = [y(places[t - 1].get(beam.parent)), y(place)];
      const d = `M${from} ${a}C${from + WIDE / 2} ${a} ${to - WIDE / 2} ${b} ${to} ${b}`;
      svg.append(makeSvg("path", { class: beam.chosen ? "beam-edge taken" : "beam-edge", d }));
    });
  });
  steps.forEach((step, t) => {
    step.forEach((beam, place) => {
      const letters = [...(beam.token || "∅")];
      const label = letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : letters.join("");
      const total = beam.total === null ? "–" : two(beam.total);
      const told = `${beam.token}: p ${share(beam.p)}, log p so far ${total}${beam.end ? ", ends here" : ""}`;
      const dot = makeSvg("circle", { cx: x(t), cy: y(place), r: 5, class: "beam-dot" });
      dots.push([dot, beam.p ?? 0]);
      const name = `beam-node${beam.chosen ? " taken" : ""}`;
      svg.append(
        makeSvg(
          "g",
          { class: name, onclick: () => state.set({ step: t + prompt, token: null }) },
          makeSvg("title", {}, told),
          makeSvg("rect", { x: x(t) - 8, y: y(place) - 28, width: WIDE - 16, height: HIGH, fill: "transparent" }),
          dot,
          makeSvg("text", { x: x(t) - 6, y: y(place) - 12 }, beam.end ? `${label} ■` : label),
        ),
      );
    });
  });

  /** @param {number} step */
  function draw(step) {
    now.setAttribute("x", String(x(step) - 12));
    for (const [dot, p] of dots) dot.setAttribute("fill", inkOf(p));
    const left = x(step) - 16;
    if (left < scroller.scrollLeft || left + WIDE > scroller.scrollLeft + scroller.clientWidth)
      scroller.scrollLeft = left - scroller.clientWidth / 2;
  }

  return { element: scroller, draw };
}
