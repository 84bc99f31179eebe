/** Lines from every token to those that it looked at: a colour and a dash for each head, thicker for more weight. */

import { make, makeSvg, tokenText } from "./dom.js";
import { inkOf, strokeOf, textOn } from "./ink.js";
import { two } from "./numbers.js";
import {
  focused,
  headsOf,
  isMarked,
  layersOf,
  measures,
  readTold,
  shownHead,
  shownNow,
  whichHeads,
  wordsTold,
} from "./shown.js";

const ROW = 28; // pixels, as in the style sheet
const LEAST = 0.05; // weight of a line
const LEAST_FOCUSED = 0.02; // and of the token that is looked at
const MOST_LINES = 1000; // more would be a cloud, and slow

/** @param {import("./state.js").State} state */
export function linesView(state) {
  const left = make("div", { class: "column queries", role: "group", "aria-label": "queries" });
  const right = make("div", { class: "column keys", role: "group", "aria-label": "keys" });
  const all = makeSvg("g", { class: "all" });
  const own = makeSvg("g", { class: "own" });
  const svg = makeSvg(
    "svg",
    { class: "links", preserveAspectRatio: "none", role: "img", "aria-label": "lines by weight" },
    all,
    own,
  );
  const asks = make("span", { class: "column-name quiet" });
  const answers = make("span", { class: "column-name quiet" });
  const caption = make("p", { class: "caption" });
  const scroller = make(
    "div",
    { class: "scroller", tabindex: "0", "aria-label": "tokens and lines" },
    make("div", { class: "lines" }, asks, answers, left, svg, right),
  );
  let sides = [];

  function column(element, list, side) {
    const units = list.units(state.words);
    const tokens = units.labels.map((label, unit) => {
      const token = { list: list.number, at: units.first[unit] };
      const number = make("span", { class: "weight" });
      const button = make(
        "button",
        {
          type: "button",
          class: "line-token",
          tabindex: "-1",
          title: label,
          onclick: () => state.choose(token),
          onpointerenter: () => state.point(pointed(token, side)),
          onpointerleave: () => state.point(null),
          onfocus: (event) => event.target.matches(":focus-visible") && state.point(pointed(token, side)),
          onblur: () => state.point(null),
        },
        tokenText(label),
      );
      return { number, button };
    });
    const rows = tokens.map(({ number, button }) =>
      make("div", { class: "line-row" }, ...(side === "queries" ? [number, button] : [button, number])),
    );
    element.replaceChildren(...rows);
    return { list, tokens, side };
  }

  /** A key that is pointed at shows who looks at it, also where it is a query too. */
  function pointed(token, side) {
    return side === "keys" ? { key: token } : { token };
  }

  /** Heads beside each other: lines between the same tokens do not hide each other. */
  function line(head, i, j, weight, least) {
    const { colour, dash } = strokeOf(head);
    const heads = headsOf(state);
    const beside = (heads.indexOf(head) - (heads.length - 1) / 2) * Math.min(3, 16 / heads.length);
    const [from, to] = [(i + 0.5) * ROW + beside, (j + 0.5) * ROW + beside];
    return makeSvg("path", {
      d: `M0 ${from}C45 ${from} 55 ${to} 100 ${to}`,
      stroke: colour,
      "stroke-width": (0.75 + 3.5 * weight).toFixed(2),
      "stroke-opacity": Math.min(1, 0.25 + 0.75 * ((weight - least) / (1 - least))).toFixed(2),
      "stroke-dasharray": dash,
    });
  }

  function draw() {
    const [layer] = layersOf(state);
    const shown = shownNow(state);
    sides = [column(left, layer.queries, "queries"), column(right, layer.keys, "keys")];
    asks.textContent = state.place.self ? "a token looks" : `${layer.queries.name} looks`;
    answers.textContent = state.place.self ? "at tokens" : `at ${layer.keys.name}`;
    const height = Math.max(shown.n, shown.m) * ROW;
    svg.setAttribute("viewBox", `0 0 100 ${height}`);
    svg.style.height = `${height}px`;
    const links = [];
    for (const head of headsOf(state)) {
      const { weights, m } = shownHead(state, head);
      for (let at = 0; at < weights.length; at++) {
        if (weights[at] >= LEAST) links.push([head, Math.floor(at / m), at % m, weights[at]]);
      }
    }
    links.sort((a, b) => b[3] - a[3]);
    const drawn = links.slice(0, MOST_LINES);
    all.replaceChildren(...drawn.map(([head, i, j, weight]) => line(head, i, j, weight, LEAST)));
    const cut = links.length > drawn.length ? `, the strongest ${MOST_LINES} of them` : "";
    const which = whichHeads(state).replace("mean of", "each of");
    caption.textContent =
      `${which}: weights after the softmax. A line for every weight from ${LEAST}${cut}; of the chosen token from ` +
      `${LEAST_FOCUSED}. ${measures(state)}${readTold(state)}${wordsTold(state)}`;
    mark();
  }

  function mark() {
    const shown = shownNow(state);
    const { row, column: key } = focused(state);
    const links = [];
    for (const head of headsOf(state)) {
      const { weights, m } = shownHead(state, head);
      const [rows, columns] = [row < 0 ? shown.n : 1, row < 0 ? 1 : shown.m];
      for (let a = 0; a < rows * columns; a++) {
        const [i, j] = row < 0 ? [a, key] : [row, a];
        if (weights[i * m + j] >= LEAST_FOCUSED) links.push(line(head, i, j, weights[i * m + j], LEAST_FOCUSED));
      }
    }
    own.replaceChildren(...links);
    const [lit, weightOf] =
      row < 0
        ? ["queries", (unit) => shown.weights[unit * shown.m + key]]
        : ["keys", (unit) => shown.weights[row * shown.m + unit]];
    for (const { list, tokens, side } of sides) {
      tokens.forEach(({ button, number }, unit) => {
        const weight = side === lit ? weightOf(unit) : 0;
        button.style.backgroundColor = weight >= LEAST_FOCUSED ? inkOf(weight) : "";
        button.style.color = weight >= LEAST_FOCUSED ? textOn(weight) : "";
        number.textContent = weight >= LEAST_FOCUSED ? two(weight) : "";
        const here = side === "queries" ? unit === row : unit === key;
        button.classList.toggle("marked", isMarked(state, list, unit));
        button.classList.toggle("chosen", here);
        button.tabIndex = here || (unit === 0 && (side === "queries" ? row : key) < 0) ? 0 : -1;
      });
    }
  }

  return { element: make("div", { class: "view-lines" }, scroller, caption), draw, mark };
}
