/** Everything by keys: steps, layers, heads, views, a token by its text, and the list of all this. */

import { chooseView, moveHead, moveLayer } from "./controls.js";
import { make } from "./dom.js";
import { VIEWS } from "./state.js";

const KEY_LIST = [
  ["← →", "step, or the token before and after"],
  ["↑ ↓", "layer"],
  ["h H", "head"],
  ["1 … 9", "view"],
  ["w", "words or pieces"],
  ["/", "find a token; Enter goes on to the next"],
  ["?", "this list"],
  ["Tab", "to every control"],
];

/**
 * @param {import("./state.js").State} state
 * @param {HTMLDialogElement} help
 * @param {HTMLInputElement} field where a token is searched
 * @param {() => void} follow called after the token changed by a key
 */
export function listenToKeys(state, help, field, follow) {
  const rows = KEY_LIST.map(([keys, what]) =>
    make("div", {}, make("dt", {}, ...keys.split(" ").map((key) => make("kbd", {}, key))), make("dd", {}, what)),
  );
  const close = make("button", { type: "button", class: "action", onclick: () => help.close() }, "close");
  help.replaceChildren(make("h2", {}, "Keyboard"), make("dl", {}, ...rows), close);

  const actions = {
    ArrowLeft: () => moveToken(state, -1),
    ArrowRight: () => moveToken(state, 1),
    ArrowUp: () => moveLayer(state, -1),
    ArrowDown: () => moveLayer(state, 1),
    h: () => moveHead(state, 1),
    H: () => moveHead(state, -1),
    w: () => state.record.hasWords && state.set({ words: !state.words }),
    "/": () => field.focus(),
    "?": () => help.showModal(),
  };
  VIEWS.forEach((view, i) => (actions[String(i + 1)] = () => chooseView(state, view)));

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === field) return;
    if (help.open) {
      if (event.key === "?") help.close();
      return;
    }
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    if (event.key.startsWith("Arrow")) follow();
  });

  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") field.blur();
    if (event.key === "Enter") find(state, field.value, event.shiftKey ? -1 : 1);
  });
  field.addEventListener("input", () => find(state, field.value, 0));
}

/** The token before or after: in the list of the chosen one, word by word where words are shown. */
function moveToken(state, by) {
  const { list, at } = state.chosen;
  const units = state.record.lists[list]?.units(state.words);
  if (!units) return;
  const unit = units.of[at] + by;
  if (unit >= 0 && unit < units.count) state.choose({ list, at: units.first[unit] });
}

/** Choose the next token with this text in it: from the chosen one on (0), or after (1) or before it (−1). */
function find(state, text, by) {
  const wanted = text.trim().toLowerCase().replaceAll(" ", "·");
  if (!wanted) return;
  const tokens = state.record.bar.flatMap((list) =>
    list.labels.map((label, at) => ({ label, token: { list: list.number, at } })),
  );
  const now = tokens.findIndex(({ token }) => token.list === state.chosen.list && token.at === state.chosen.at);
  for (let i = 0; i < tokens.length; i++) {
    const step = by < 0 ? -1 : 1;
    const { label, token } = tokens[(now + (by || 0) + step * i + 2 * tokens.length) % tokens.length];
    if (label.toLowerCase().includes(wanted)) return state.choose(token);
  }
}
