/** The controls under the sentence: where was looked, which layer, which heads, which view. */

import { make, makeSvg } from "./dom.js";
import { strokeOf } from "./ink.js";
import { headsOf, layersOf } from "./shown.js";
import { VIEWS } from "./state.js";

/** @param {HTMLElement} element @param {import("./state.js").State} state */
export function controlBar(element, state) {
  const { record } = state;
  const updates = [];

  /** A group with its name before it. */
  const group = (name, ...children) =>
    make(
      "div",
      { class: "group", role: "group", "aria-label": name },
      make("span", { class: "quiet" }, name),
      ...children,
    );

  /** Buttons of which one is down. */
  function choices(name, items, chosen, choose) {
    const buttons = items.map(({ label, value, title }) => {
      const button = make("button", { type: "button", class: "choice", title, onclick: () => choose(value) }, label);
      updates.push(() => button.setAttribute("aria-pressed", String(chosen() === value)));
      return button;
    });
    return group(name, make("div", { class: "choices" }, ...buttons));
  }

  /** A number with a step to either side. */
  function stepper(name, text, move) {
    const told = make("output", { class: "stepper-value" });
    updates.push(() => (told.textContent = text()));
    const step = (by, sign, label) =>
      make("button", { type: "button", class: "step", "aria-label": label, onclick: () => move(by) }, sign);
    return group(
      name,
      make("div", { class: "stepper" }, step(-1, "◂", `${name} before`), told, step(1, "▸", `next ${name}`)),
    );
  }

  const parts = [];
  const chips = make("div", { class: "heads", role: "group", "aria-label": "heads, several at a time" });
  if (record.places.length) {
    const places = record.places.map((place, value) => ({ label: place.name, value }));
    parts.push(
      choices(
        "where looked",
        places,
        () => state.where,
        (where) => state.set({ where }),
      ),
    );
    const layerText = () => (state.layer === null ? "all" : `${state.layer + 1} of ${state.place.layers.length}`);
    parts.push(stepper("layer", layerText, (by) => moveLayer(state, by)));
    const headText = () => (state.heads.length ? state.heads.map((head) => head + 1).join(", ") : "all");
    parts.push(stepper("head", headText, (by) => moveHead(state, by)));
    parts.at(-1).append(chips);
  }
  if (parts.length) parts.push(make("div", { class: "break" }));
  const views = state.views.map((view) => ({ label: view, value: view, title: `key ${VIEWS.indexOf(view) + 1}` }));
  parts.push(
    choices(
      "view",
      views,
      () => state.view,
      (view) => chooseView(state, view),
    ),
  );
  if (record.hasWords) {
    const units = [
      { label: "pieces", value: false },
      { label: "words", value: true },
    ];
    parts.push(
      choices(
        "tokens",
        units,
        () => state.words,
        (words) => state.set({ words }),
      ),
    );
  }
  element.append(...parts);

  /** One switch a head, with the stroke that it has in the lines. */
  function drawHeads() {
    if (!state.place || layersOf(state)[0].heads < 2) return chips.replaceChildren();
    const on = new Set(headsOf(state));
    const focus = [...chips.children].indexOf(document.activeElement);
    chips.replaceChildren(
      ...Array.from({ length: layersOf(state)[0].heads }, (_, head) =>
        make(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-pressed": String(on.has(head)),
            "aria-label": `head ${head + 1}`,
            onclick: () => toggleHead(state, head),
          },
          stroke(head),
          String(head + 1),
        ),
      ),
    );
    chips.children[focus]?.focus();
  }

  return {
    draw() {
      for (const update of updates) update();
      drawHeads();
    },
  };
}

/** A short piece of a head's line. @param {number} head */
export function stroke(head) {
  const { colour, dash } = strokeOf(head);
  const line = makeSvg("line", {
    x1: 1,
    y1: 5,
    x2: 25,
    y2: 5,
    stroke: colour,
    "stroke-width": 2.5,
    "stroke-dasharray": dash,
  });
  return makeSvg("svg", { class: "stroke", width: 26, height: 10, "aria-hidden": "true" }, line);
}

/** All layers, then the first, … the last. @param {import("./state.js").State} state @param {number} by */
export function moveLayer(state, by) {
  if (!state.place) return;
  const first = state.place.even && state.place.layers.length > 1 ? -1 : 0;
  const next = (state.layer ?? -1) + by;
  if (next < first || next >= state.place.layers.length) return;
  state.set({ layer: next < 0 ? null : next });
}

/** All heads, then one after the other, and round. @param {import("./state.js").State} state @param {number} by */
export function moveHead(state, by) {
  if (!state.place) return;
  const all = layersOf(state)[0].heads;
  const now = state.heads.length ? state.heads[by > 0 ? state.heads.length - 1 : 0] + 1 : 0;
  const next = (now + by + all + 1) % (all + 1);
  state.set({ heads: next ? [next - 1] : [] });
}

/** Switch one head on or off; the first switch among all leaves that head alone. */
function toggleHead(state, head) {
  const heads = state.heads.includes(head) ? state.heads.filter((other) => other !== head) : [...state.heads, head];
  state.set({ heads: heads.length === layersOf(state)[0].heads ? [] : heads });
}

/** @param {import("./state.js").State} state @param {string} view */
export function chooseView(state, view) {
  if (!state.views.includes(view)) return;
  const changes = { view };
  // An alignment is one of cross-attention.
  if (view === "alignment" && !state.place.cross) changes.where = state.record.places.findIndex((place) => place.cross);
  state.set(changes);
}
