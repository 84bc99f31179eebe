/** The sentence bar: every token of the source and of the target, the current step marked, shaded by the weights. */

import { make, tokenText } from "./dom.js";
import { inkOf, textOn } from "./ink.js";
import { focused, isMarked, layersOf, shownNow } from "./shown.js";

const SHADED = 0.02; // below this a token stays plain: no ink is seen anyway

/** @param {HTMLElement} element @param {import("./state.js").State} state */
export function sentenceBar(element, state) {
  const { record } = state;
  let words = null;
  /** @type {{list: import("./record.js").TokenList, buttons: HTMLElement[]}[]} */
  let rows = [];

  function build() {
    words = state.words;
    rows = record.bar.map((list) => ({ list, buttons: buttonsOf(list) }));
    element.replaceChildren(
      ...rows.map(({ list, buttons }) =>
        make(
          "div",
          { class: "sentence-row" },
          make("span", { class: "sentence-name" }, list.name),
          make("div", { class: "tokens", role: "group", "aria-label": `${list.name} tokens`, dir: "auto" }, ...buttons),
        ),
      ),
    );
  }

  function buttonsOf(list) {
    const units = list.units(words);
    return units.labels.map((label, unit) => {
      const token = { list: list.number, at: units.first[unit] };
      return make(
        "button",
        {
          class: `piece${units.starts[unit] ? " start" : ""}`,
          type: "button",
          tabindex: "-1",
          title: label,
          onclick: () => state.choose(token),
          onpointerenter: () => state.point({ token }),
          onpointerleave: () => state.point(null),
          onfocus: (event) => event.target.matches(":focus-visible") && state.point({ token }),
          onblur: () => state.point(null),
        },
        tokenText(label),
      );
    });
  }

  /** The weight that each token of a list has in the present focus, or null. */
  function shades(list) {
    if (!state.place) return () => 0;
    const [layer] = layersOf(state);
    const shown = shownNow(state);
    const { row, column } = focused(state);
    const [side, weight] =
      row >= 0
        ? [layer.keys, (j) => shown.weights[row * shown.m + j]]
        : [layer.queries, (i) => shown.weights[i * shown.m + column]];
    const units = side.units(state.words);
    const mine = list.units(state.words);
    return (unit) => {
      const at = record.same({ list: list.number, at: mine.first[unit] }, side);
      return at < 0 ? 0 : weight(units.of[at]);
    };
  }

  function mark() {
    for (const { list, buttons } of rows) {
      const shade = shades(list);
      const chosen = list.units(words).of[record.same(state.chosen, list)] ?? -1;
      buttons.forEach((button, unit) => {
        const weight = shade(unit);
        button.style.backgroundColor = weight >= SHADED ? inkOf(weight) : "";
        button.style.color = weight >= SHADED ? textOn(weight) : "";
        button.classList.toggle("marked", isMarked(state, list, unit));
        button.classList.toggle("chosen", unit === chosen);
        button.setAttribute("aria-pressed", String(unit === chosen));
        button.tabIndex = unit === Math.max(chosen, 0) ? 0 : -1;
      });
    }
  }

  function draw() {
    if (words !== state.words) build();
    mark();
    for (const { list, buttons } of rows) {
      const at = record.same(state.chosen, list);
      const weights = buttons.map((_, unit) => unit).map(shades(list));
      const unit = at >= 0 ? list.units(words).of[at] : weights.indexOf(Math.max(...weights));
      if (buttons[unit]) reveal(buttons[unit]);
    }
  }

  /** Move the focus along the tokens with the choice. */
  function follow() {
    if (!element.contains(document.activeElement)) return;
    for (const { list, buttons } of rows) {
      const at = state.chosen.list === list.number ? state.chosen.at : -1;
      if (at >= 0) buttons[list.units(words).of[at]].focus();
    }
  }

  return { draw, mark, follow };
}

/** Scroll a row, and only that row, until an element of it is seen. @param {HTMLElement} element */
function reveal(element) {
  const row = element.parentElement;
  const [mine, outer] = [element.getBoundingClientRect(), row.getBoundingClientRect()];
  if (mine.left < outer.left) row.scrollLeft -= outer.left - mine.left + 32;
  else if (mine.right > outer.right) row.scrollLeft += mine.right - outer.right + 32;
}
