/** The decode step by step: what could have come, what came, what it looked at, and the beams beside it. */

import { beamTree } from "./beams.js";
import { Bars, make, tokenText } from "./dom.js";
import { candidateRows } from "./inspector.js";
import { count, two } from "./numbers.js";
import { layersOf, shownNow, whichHeads } from "./shown.js";

const ROWS = 8;
const KINDS = {
  beam: (search) => `Beam search, the best ${search.width ?? "few"} side by side`,
  greedy: () => "Greedy search: the likeliest token at each step",
  "one path": () => "One path, a token at each step",
  sample: () => "Each token drawn by its probability",
  forced: () => "The target was given: nothing was searched",
};

/** @param {import("./state.js").State} state */
export function stepsView(state) {
  const { record } = state;
  const { search, main, prompt } = record;
  const last = Math.max(1, main.count - prompt);
  const choose = () => state.set({ step: prompt + Number(slider.value) - 1, token: null });
  const slider = make("input", {
    type: "range",
    min: "1",
    max: String(last),
    step: "1",
    "aria-label": "step",
    oninput: choose,
  });
  const told = make("output", { class: "step-told" });
  const candidates = new Bars(ROWS, "candidates with their probabilities");
  const looks = new Bars(ROWS, "what this step looked at");
  const looksName = make("h3", {});
  const tree = search.steps?.length ? beamTree(state) : null;
  const finished = make(
    "ol",
    { class: "finished" },
    ...(search.finished ?? []).map(({ text, score }) =>
      make(
        "li",
        {},
        make("bdi", { dir: "auto" }, text),
        make("span", { class: "quiet" }, score === null ? "–" : two(score)),
      ),
    ),
  );
  const caption = make("p", { class: "caption" });
  const columns = make("div", { class: "columns" });
  if (search.candidates) columns.append(make("div", {}, make("h3", {}, "candidates"), candidates.element));
  if (record.places.length) columns.append(make("div", {}, looksName, looks.element));

  const parts = [make("div", { class: "slider" }, slider, told), columns];
  if (tree) parts.push(make("h3", {}, search.kind === "beam" ? "beams" : "the way"), tree.element);
  if (search.finished?.length) parts.push(make("h3", {}, "finished, best first"), finished);

  function draw() {
    const step = Math.max(0, state.step - prompt); // a prompt was not searched: the first token after it is shown
    const label = main.labels[prompt + step] ?? "";
    slider.value = String(step + 1);
    slider.setAttribute("aria-valuetext", `step ${step + 1}: ${label}`);
    told.replaceChildren(`step ${step + 1} of ${last}  `, tokenText(label));
    candidates.show(candidateRows(search.candidates?.[step] ?? []));
    if (record.places.length) showLooks(prompt + step);
    tree?.draw(step);
    const from = record.places.length ? ` Looked at: ${whichHeads(state)}, weights after the softmax.` : "";
    const ways = tree
      ? ` ${count(search.steps.length, "step")}; more ink, a likelier token; ■ ends; the strong way was taken. Hover for log p.`
      : "";
    caption.textContent =
      `${KINDS[search.kind]?.(search) ?? "The search"}. Candidates: probabilities of the model after its softmax, ` +
      `likeliest first.${ways}${from}`;
  }

  function showLooks(step) {
    const [layer] = layersOf(state);
    const shown = shownNow(state);
    const at = record.rowOfStep(step, layer);
    const row = at < 0 ? -1 : layer.queries.units(state.words).of[at];
    looksName.textContent =
      row < 0 ? `${state.place.name} has no row for this step` : `looked at (${state.place.name})`;
    const weights =
      row < 0 ? [] : shown.columns.labels.map((label, j) => ({ label, part: shown.weights[row * shown.m + j] }));
    const strong = weights.sort((a, b) => b.part - a.part).slice(0, ROWS);
    looks.show(strong.filter(({ part }) => part >= 0.005).map(({ label, part }) => ({ label, part, text: two(part) })));
  }

  return { element: make("div", { class: "view-steps" }, ...parts, caption), draw, mark() {} };
}
