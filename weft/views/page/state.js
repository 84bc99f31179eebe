/**
 * What is chosen. It lives in the address' fragment, so that a view can be sent as a link or opened again.
 *
 * In the fragment layers, heads and steps are counted from 1, as on the page; in here from 0.
 */

/** The views in the order of their number keys. */
export const VIEWS = ["lines", "matrix", "grid", "steps", "alignment", "shuffle", "positions", "gates", "walk"];

export class State {
  /** @param {import("./record.js").PageRecord} record */
  constructor(record) {
    this.record = record;
    this.views = VIEWS.filter((view) => available(record, view));
    this.listeners = [];
    /** What the pointer or the focus is on: a token, or a cell of a matrix; never in the fragment. */
    this.hover = null;
    this.reset();
    this.restore(location.hash);
    // Typing another fragment, or going back, is a choice too.
    addEventListener("hashchange", () => {
      if (location.hash !== this.fragment()) {
        this.hover = null;
        this.reset();
        this.restore(location.hash);
        this.tell(false);
      }
    });
  }

  /** What is shown first. */
  reset() {
    const { places } = this.record;
    const crossing = places.findIndex((place) => place.cross);
    this.where = Math.max(0, crossing);
    this.layer = Math.max(0, (places[this.where]?.layers.length ?? 1) - 1);
    /** @type {number[]} the heads chosen; none stands for all */
    this.heads = [];
    this.view = this.views[0];
    const { main, prompt } = this.record;
    // The first token that was found; of a text that was only read, the last, which looked at all the others.
    this.step = main.name === "target" || prompt ? prompt : main.count - 1;
    /** @type {import("./record.js").Token|null} another token than the step's own */
    this.token = null;
    this.words = false;
    this.theme = "";
    this.seed = 1;
  }

  get place() {
    return this.record.places[this.where];
  }

  /** The token that is chosen. @returns {import("./record.js").Token} */
  get chosen() {
    return this.token ?? { list: this.record.main.number, at: this.step };
  }

  /** Choose; every panel is told. */
  set(changes) {
    // Another layer or head is looked at for what is pointed at; otherwise the choice is what counts now.
    if (!Object.keys(changes).every((name) => ["layer", "heads", "theme"].includes(name))) this.hover = null;
    Object.assign(this, changes);
    this.mend();
    this.tell(false);
    try {
      history.replaceState(null, "", this.fragment());
    } catch {
      // A sandboxed frame has no address of its own.
    }
  }

  /** Choose a token: one of the steps' list is a step. @param {import("./record.js").Token} token */
  choose(token) {
    const step = this.record.same(token, this.record.main);
    if (step >= 0) this.set({ step, token: null });
    else this.set({ token });
  }

  /** Point at something without choosing it; null for nothing. */
  point(hover) {
    if (JSON.stringify(hover) === JSON.stringify(this.hover)) return;
    this.hover = hover;
    this.tell(true);
  }

  /** @param {(hoverOnly: boolean) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  tell(hoverOnly) {
    for (const listener of this.listeners) listener(hoverOnly);
  }

  /** Make the choice one that there is. */
  mend() {
    const { places, main } = this.record;
    this.where = within(this.where, places.length);
    this.step = within(this.step, main.count);
    if (!this.views.includes(this.view)) this.view = this.views[0];
    if (!this.place) return;
    if (this.view === "alignment" && !this.place.cross) this.view = "matrix";
    if (this.layer === null && !this.place.even) this.layer = 0;
    if (this.layer !== null) this.layer = within(this.layer, this.place.layers.length);
    const heads = this.layer === null ? this.place.heads : this.place.layers[this.layer].heads;
    this.heads = [...new Set(this.heads)].filter((head) => head >= 0 && head < heads).sort((a, b) => a - b);
    if (this.token && !(this.record.lists[this.token.list]?.count > this.token.at)) this.token = null;
  }

  fragment() {
    const parts = new URLSearchParams();
    if (this.place) {
      parts.set("where", this.place.name);
      parts.set("layer", this.layer === null ? "all" : String(this.layer + 1));
      parts.set("head", this.heads.length ? this.heads.map((head) => head + 1).join(",") : "all");
    }
    parts.set("view", this.view ?? "");
    parts.set("step", String(this.step + 1));
    if (this.token) parts.set("token", `${this.record.lists[this.token.list].name}.${this.token.at + 1}`);
    if (this.words) parts.set("words", "1");
    if (this.theme) parts.set("theme", this.theme);
    if (this.seed !== 1) parts.set("seed", String(this.seed));
    return `#${parts}`;
  }

  /** @param {string} fragment */
  restore(fragment) {
    const parts = new URLSearchParams(fragment.slice(1));
    const whole = (name, usual) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : usual);
    const where = this.record.places.findIndex((place) => place.name === parts.get("where"));
    if (where >= 0) [this.where, this.layer] = [where, this.record.places[where].layers.length - 1];
    this.layer = parts.get("layer") === "all" ? null : whole("layer", (this.layer ?? 0) + 1) - 1;
    if (/^[\d,]+$/.test(parts.get("head") ?? ""))
      this.heads = parts
        .get("head")
        .split(",")
        .map((head) => Number(head) - 1);
    if (parts.has("view")) this.view = parts.get("view");
    this.step = whole("step", this.step + 1) - 1;
    const [, name, at] = /^(.*)\.(\d+)$/.exec(parts.get("token") ?? "") ?? [];
    const list = this.record.lists.find((candidate) => candidate.name === name);
    if (list && at >= 1 && at <= list.count) this.token = { list: list.number, at: at - 1 };
    this.words = this.record.hasWords && parts.get("words") === "1";
    this.theme = ["light", "dark"].includes(parts.get("theme")) ? parts.get("theme") : "";
    this.seed = whole("seed", 1);
    this.mend();
  }
}

function within(number, count) {
  return Math.min(Math.max(number, 0), Math.max(count - 1, 0));
}

function available(record, view) {
  switch (view) {
    case "steps":
      return Boolean(record.search);
    case "alignment":
      return record.places.some((place) => place.cross);
    case "shuffle":
      return record.places.some((place) => place.layers.some((layer) => layer.data.vectors?.values));
    case "positions":
      return record.positions.length > 0;
    case "gates":
      return record.gates.length > 0;
    case "walk":
      return record.walk !== null;
    default:
      return record.places.length > 0;
  }
}
