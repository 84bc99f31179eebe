/** The inspector: the token that is pointed at or chosen, what it looked at and how, and what else could have come. */

import { Bars, make, tokenText } from "./dom.js";
import { headworkPanel } from "./headwork.js";
import { share, two } from "./numbers.js";
import { focused, layersOf, shownNow, whichHeads } from "./shown.js";

const LOOKS = 6;
const LOOKED = 3;
const CANDIDATES = 5;

/** @param {HTMLElement} element @param {import("./state.js").State} state */
export function inspectorPanel(element, state) {
  const { record } = state;
  const title = make("h2", {});
  const under = make("p", { class: "quiet which" });
  const looksName = make("h3", {});
  const looks = new Bars(LOOKS, "strongest weights");
  const lookedName = make("h3", {}, "is looked at by");
  const looked = new Bars(LOOKED, "who looks at it");
  const headwork = headworkPanel(state);
  const headworkName = make("h3", {}, "how the head got there");
  const candidatesName = make("h3", {});
  const candidates = new Bars(CANDIDATES, "candidates of this step");
  element.append(
    title,
    under,
    looksName,
    looks.element,
    lookedName,
    looked.element,
    candidatesName,
    candidates.element,
    headworkName,
    headwork.element,
  );

  /** The `most` largest of a row or a column. */
  function top(units, weight, most, strong = -1) {
    return units.labels
      .map((label, i) => ({ label, part: weight(i), text: two(weight(i)), strong: i === strong }))
      .sort((a, b) => b.part - a.part)
      .slice(0, most)
      .filter(({ part }) => part >= 0.005);
  }

  function showWeights() {
    const shown = shownNow(state);
    const { row, column, cell, query } = focused(state);
    const [layer] = layersOf(state);
    const at = (i, j) => shown.weights[i * shown.m + j];
    const asKey = row < 0;
    title.replaceChildren(tokenText(asKey ? shown.columns.labels[column] : (shown.rows.labels[row] ?? "")));
    under.textContent = whichHeads(state);
    looksName.hidden = looks.element.hidden = state.view === "steps"; // that view tells the same
    looksName.textContent = asKey ? "is looked at by" : "looks at";
    looks.show(
      asKey
        ? top(shown.rows, (i) => at(i, column), LOOKS)
        : top(shown.columns, (j) => at(row, j), LOOKS, cell ? column : -1),
    );
    lookedName.hidden = looked.element.hidden = !state.place.self;
    if (state.place.self) {
      const mine = record.same({ list: layer.queries.number, at: shown.rows.first[row] ?? 0 }, layer.keys);
      const key = asKey ? -1 : (shown.columns.of[mine] ?? -1);
      looked.show(key < 0 ? [] : top(shown.rows, (i) => at(i, key), LOOKED));
    }
    const asker = asKey ? strongestQuery(shown, column) : null;
    headwork.show(asker === null ? query : { list: layer.queries.number, at: shown.rows.first[asker] });
  }

  function strongestQuery(shown, column) {
    let best = 0;
    for (let i = 1; i < shown.n; i++)
      if (shown.weights[i * shown.m + column] > shown.weights[best * shown.m + column]) best = i;
    return best;
  }

  function showCandidates() {
    const all = record.search?.candidates;
    candidatesName.hidden = candidates.element.hidden = !all || state.view === "steps";
    if (!all) return;
    const token = state.hover?.token ?? state.hover?.query ?? state.chosen;
    const at = record.same(token, record.main);
    const step = (at >= 0 ? at : state.step) - record.prompt;
    candidatesName.textContent = step < 0 ? "given, not searched" : `candidates at step ${step + 1}`;
    candidates.show(candidateRows(all[step] ?? []));
  }

  function mark() {
    if (state.place) showWeights();
    else {
      const { list, at } = state.chosen;
      title.replaceChildren(tokenText(record.lists[list]?.labels[at] ?? ""));
    }
    showCandidates();
  }

  for (const part of [looksName, looks.element, lookedName, looked.element, headworkName, headwork.element])
    part.hidden = !state.place;
  return { draw: mark, mark };
}

/** Candidates as rows of bars; the chosen one is strong. */
export function candidateRows(candidates) {
  return candidates.map(({ token, p, chosen }) => ({
    label: token || "∅",
    part: p ?? 0,
    text: share(p),
    strong: chosen,
  }));
}
