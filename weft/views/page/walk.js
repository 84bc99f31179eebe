/** The walk through a GPT, told for its last token: from text to vectors, block by block, to the next token. */

import { unpack } from "./arrays.js";
import { Bars, make, tokenText } from "./dom.js";
import { heatPicture, largest, paintVector, vectorStrip } from "./heat.js";
import { share, short, two } from "./numbers.js";

const NEXT = 10;
const LISTED = 0.00005; // a smaller share is not told
const PLACES = {
  learned: "To it is added a learned vector of the place where the token stands.",
  rotary: "Nothing is added for its place: attention turns queries and keys by it (rotary positions).",
  alibi: "Nothing is added for its place: attention subtracts from a score what is far away (ALiBi).",
  none: "Nothing tells its place but which tokens it may look at.",
};

/** @param {import("./state.js").State} state */
export function walkView(state) {
  const { walk } = state.record;
  const redraw = [];
  const labels = walk.labels;
  const last = labels.at(-1);
  const read = (name) => (walk[name] ? unpack(walk[name]) : null);
  const [layers, heads] = walk.heads.shape;
  const width = walk.heads.shape.at(-1);
  const parts = {
    stream: read("stream"),
    between: read("between"),
    heads: read("heads"),
    feed: read("feed_forward"),
    rest: read("rest"),
    looks: read("looks"),
    norms: read("norms"),
  };
  const vector = (name, ...at) => {
    const place = at.length > 1 ? at[0] * heads + at[1] : at[0];
    return parts[name].subarray(place * width, (place + 1) * width);
  };
  const length = (v) => Math.hypot(...v);
  const most = Math.max(
    1e-9,
    ...Array.from({ length: layers * heads }, (_, i) => length(parts.heads.subarray(i * width, (i + 1) * width))),
    ...Array.from({ length: layers }, (_, l) => length(vector("feed", l))),
  );

  function section(title, told, ...body) {
    return make("section", {}, make("h2", {}, title), make("p", {}, told), ...body);
  }

  function text() {
    const ids = walk.ids.map((id, i) =>
      make("li", {}, tokenText(labels[i]), make("span", { class: "quiet" }, String(id))),
    );
    return section(
      "Text to tokens",
      "The text is cut into pieces. Each has a number in the vocabulary.",
      make("ol", { class: "ids" }, ...ids),
    );
  }

  function vectors() {
    const shown = walk.tokens.shape[0];
    const from = labels.length - shown;
    const picture = (name, packed) => {
      const [rows, columns] = packed.shape;
      const drawn = heatPicture({
        name,
        rows,
        columns,
        numbers: unpack(packed),
        across: (d) => `dimension ${d + 1}`,
        down: (i) => `\u2068${labels[from + i]}\u2069`,
        height: Math.max(32, rows * 12),
      });
      redraw.push(drawn.draw);
      return drawn.element;
    };
    const body = [picture(from ? `the last ${shown} tokens` : "tokens, one a row", walk.tokens)];
    if (walk.positions) body.push(picture("+ their places", walk.positions));
    return section(
      "Tokens to vectors",
      `Each number picks its row of the embedding matrix: a vector of ${width} numbers. ${PLACES[walk.scheme] ?? ""}`,
      ...body,
    );
  }

  /** A line of a block: a name, the vector as a strip, its length, and for what is added a bar and a remark. */
  function line(name, v, added, remark = "") {
    const canvas = vectorStrip(name);
    redraw.push(() => paintVector(canvas, v, largest(v)));
    const ink = make("span", { class: "bar-ink" });
    ink.style.width = `${added ? (100 * length(v)) / most : 0}%`;
    return make(
      "li",
      { class: added ? "added" : "sum" },
      make("span", {}, name),
      canvas,
      make("span", { class: "bar" }, ink),
      make("span", { class: "bar-number" }, short(length(v))),
      make("span", { class: "quiet remark" }, ...[remark].flat()),
    );
  }

  function block(layer) {
    const n = labels.length;
    const rows = [line("before", vector("stream", layer), false)];
    for (let head = 0; head < heads; head++) {
      const looks = parts.looks.subarray((layer * heads + head) * n, (layer * heads + head + 1) * n);
      const key = looks.indexOf(Math.max(...looks));
      rows.push(
        line(`+ head ${head + 1}`, vector("heads", layer, head), true, [
          `${two(looks[key])} on `,
          tokenText(labels[key]),
        ]),
      );
    }
    if (parts.rest) rows.push(line("+ bias", vector("rest", layer), true));
    rows.push(
      line("= attended", vector("between", layer), false),
      line("+ feed-forward", vector("feed", layer), true),
      line("= after", vector("stream", layer + 1), false),
    );
    const told = layer
      ? "The same once more, with weights of its own."
      : "Each head adds what it takes from the tokens it looks at, then the feed-forward network what it makes of the " +
        "token alone. Here for the last token, after which the next comes; the number is the length of a vector.";
    return section(`Block ${layer + 1} of ${layers}`, told, make("ol", { class: "block" }, ...rows));
  }

  function stream() {
    const drawn = heatPicture({
      name: "length of the vector",
      rows: layers + 1,
      columns: labels.length,
      numbers: parts.norms,
      across: (i) => `\u2068${labels[i]}\u2069`,
      ticks: labels,
      down: (block) => (block ? `after block ${block}` : "before the first block"),
      most: largest(parts.norms),
      height: Math.max(32, (layers + 1) * 14),
    });
    redraw.push(drawn.draw);
    return section(
      "The residual stream",
      "What every token carries along: the length of its vector before the first block and after each; tokens " +
        "across, blocks down.",
      drawn.element,
    );
  }

  function probabilities() {
    const bars = new Bars(Math.min(NEXT, walk.next.length), "what may come next");
    bars.show(
      walk.next
        .slice(0, NEXT)
        .map(({ token, p }) => ({ label: token || "∅", part: p ?? 0, text: share(p), strong: token === walk.chosen })),
    );
    const canvas = vectorStrip("normalised");
    const hidden = read("hidden");
    redraw.push(() => paintVector(canvas, hidden));
    const told = make(
      "p",
      {},
      "The vector of ",
      tokenText(last),
      " is normalised and multiplied with the output matrix: a score for every token. The softmax makes " +
        "probabilities of them.",
    );
    return make("section", {}, make("h2", {}, "Vector to probabilities"), told, canvas, bars.element);
  }

  function drawing() {
    const rule = walk.rule ? ` (made with ${walk.rule})` : "";
    const whole = walk.next.reduce((sum, { share: part }) => sum + (part ?? 0), 0);
    const line_ = make("div", { class: "line", role: "img", "aria-label": `shares from 0 to 1, u = ${walk.u}` });
    for (const { token, share: part } of walk.next) {
      if (!(part >= LISTED)) continue;
      const piece = make(
        "span",
        { class: token === walk.chosen ? "piece-of chosen" : "piece-of", title: `${token}: ${share(part)}` },
        part > 0.04 ? tokenText(token) : "",
      );
      piece.style.width = `${100 * part}%`;
      line_.append(piece);
    }
    if (whole < 0.9995) {
      const others = make("span", { class: "piece-of others" }, 1 - whole > 0.08 ? "others" : "");
      others.style.width = `${100 * Math.max(0, 1 - whole)}%`;
      line_.append(others);
    }
    const needle = make("span", { class: "needle" });
    needle.style.left = `${100 * walk.u}%`;
    line_.append(needle);
    const told =
      `The tokens that may come stand in a line from 0 to 1, each as wide as its share${rule}. ` +
      `A random number falls on one of them: u = ${walk.u.toFixed(4)}.`;
    const end = make(
      "p",
      {},
      "The next token is ",
      tokenText(walk.chosen),
      ". With it at the end of the text, all begins anew.",
    );
    return section("The draw", told, line_, end);
  }

  const body = [text(), vectors(), ...Array.from({ length: layers }, (_, layer) => block(layer)), stream()];
  if (walk.next?.length) body.push(probabilities());
  if (walk.next?.length && typeof walk.u === "number") body.push(drawing());
  const caption = make(
    "p",
    { class: "caption" },
    "Vectors are drawn a column a number, two hues around 0, each to its own largest; a bar is as long as what was " +
      "added, all to one measure.",
  );
  return {
    element: make("div", { class: "view-walk" }, ...body, caption),
    draw() {
      for (const again of redraw) again();
    },
    mark() {},
  };
}
