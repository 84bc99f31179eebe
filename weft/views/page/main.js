/** The page: reads its record, makes its parts and keeps them together. */

import { alignmentView } from "./alignment.js";
import { controlBar } from "./controls.js";
import { make } from "./dom.js";
import { gatesView } from "./gates.js";
import { gridView } from "./grid.js";
import { inspectorPanel } from "./inspector.js";
import { listenToKeys } from "./keyboard.js";
import { linesView } from "./lines.js";
import { matrixView } from "./matrix.js";
import { positionsView } from "./positions.js";
import { PageRecord } from "./record.js";
import { sentenceBar } from "./sentence.js";
import { shuffleView } from "./shuffle.js";
import { State } from "./state.js";
import { stepsView } from "./steps.js";
import { walkView } from "./walk.js";

const MAKERS = {
  lines: linesView,
  matrix: matrixView,
  grid: gridView,
  steps: stepsView,
  alignment: alignmentView,
  shuffle: shuffleView,
  positions: positionsView,
  gates: gatesView,
  walk: walkView,
};
const NOTE = "Attention shows where information was taken from, not why the answer is right.";

function begin() {
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  const record = new PageRecord(JSON.parse(byId("record").textContent));
  const state = new State(record);
  const sentence = sentenceBar(byId("sentence"), state);
  const controls = controlBar(byId("controls"), state);
  const inspector = inspectorPanel(byId("inspector"), state);
  const views = new Map();
  const field = make("input", {
    type: "search",
    placeholder: "find a token",
    "aria-label": "find a token",
    autocomplete: "off",
    spellcheck: "false",
  });
  const theme = make("button", {
    type: "button",
    class: "action",
    onclick: () => state.set({ theme: { "": "light", light: "dark", dark: "" }[state.theme] }),
  });
  const help = byId("help");
  const ask = make(
    "button",
    { type: "button", class: "action", "aria-label": "keyboard help", onclick: () => help.showModal() },
    "?",
  );
  header(byId("head"), record.about, [field, theme, ask]);
  byId("foot").append(
    make("p", {}, NOTE),
    ...(record.about.notes ?? []).map((note) => make("p", { dir: "auto" }, note)),
  );

  function view() {
    if (!state.view) return null;
    if (!views.has(state.view)) views.set(state.view, MAKERS[state.view](state));
    return views.get(state.view);
  }

  function draw() {
    root.dataset.theme = state.theme;
    // Pictures take their colours from the scheme, so a grid drawn in another one is drawn again.
    root.dataset.drawn = state.theme || String(dark.matches);
    theme.textContent = `◐ ${state.theme || "auto"}`;
    theme.setAttribute("aria-label", `colours: ${state.theme || "as the system"}`);
    const shown = view();
    const room = byId("view");
    if (shown && room.firstChild !== shown.element) room.replaceChildren(shown.element);
    if (!shown) room.replaceChildren(make("p", { class: "quiet" }, "Nothing was recorded."));
    controls.draw();
    sentence.draw();
    inspector.draw();
    shown?.draw();
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  state.listen((hoverOnly) => {
    if (!hoverOnly) return draw();
    sentence.mark();
    inspector.mark();
    view()?.mark();
  });
  listenToKeys(state, help, field, () => sentence.follow());
  draw();
  root.dataset.ready = "true";
}

/** Title, texts and model on the left, the small controls on the right. */
function header(element, about, tools) {
  const told = [make("h1", { dir: "auto", title: about.title }, about.title || "What the model looked at")];
  const source = about.source_text !== about.title ? about.source_text : ""; // no text is told twice
  const texts = [source, about.target_text && "→", about.target_text].filter(Boolean);
  if (texts.length)
    told.push(
      make("p", { title: texts.join(" ") }, ...texts.flatMap((text) => [make("bdi", { dir: "auto" }, text), " "])),
    );
  if (about.model) told.push(make("p", { class: "quiet" }, about.model));
  element.append(make("div", {}, ...told), make("div", { class: "tools" }, ...tools));
}

if (typeof document !== "undefined") begin();
