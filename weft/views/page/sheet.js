/** A large matrix on a canvas that scrolls: labels stay in sight, and only what is seen is drawn. */

import { make } from "./dom.js";
import { hatch, inkOf, styled } from "./ink.js";

const SMALLEST = 18; // pixels of a cell: a long sentence scrolls, it is not shrunk to dust
const ROOMY = 24; // a matrix that does not fit the window's height has cells of at most this
const LARGEST = 44;
const HEADROOM = 340; // pixels of the window that are needed for other things than a matrix
const LONGEST = 116; // pixels of a label
const SLANT = -Math.PI / 3;
const GAP = 6;

/**
 * What a sheet shows.
 *
 * @typedef {{n: number, m: number, rows: string[], columns: string[], full: number,
 *            weight: (i: number, j: number) => number, closed: (i: number, j: number) => boolean,
 *            over?: (pen: CanvasRenderingContext2D, x: (j: number) => number, y: (i: number) => number,
 *                    cell: number) => void}} Sheeted
 */
export class Sheet {
  /**
   * @param {string} name
   * @param {(i: number, j: number) => void} onPoint −1 for a label or nothing
   * @param {(i: number, j: number) => void} onPick
   */
  constructor(name, onPoint, onPick) {
    this.canvas = make("canvas", { role: "img", "aria-label": name });
    this.space = make("div", { class: "sheet-space" }, this.canvas);
    this.element = make("div", { class: "sheet", tabindex: "0", "aria-label": `${name}, scrolls` }, this.space);
    this.marks = { row: -1, column: -1 };
    const at = (event) => this.cellAt(event);
    this.element.addEventListener("pointermove", (event) => onPoint(...at(event)));
    this.element.addEventListener("pointerleave", () => onPoint(-1, -1));
    this.element.addEventListener("click", (event) => onPick(...at(event)));
    this.element.addEventListener("scroll", () => this.later());
    new ResizeObserver(() => this.sheeted && this.layOut()).observe(this.element);
  }

  /** @param {Sheeted} sheeted */
  show(sheeted) {
    this.sheeted = sheeted;
    this.layOut();
  }

  /** Mark a row and a column, −1 for none. */
  mark(row, column) {
    this.marks = { row, column };
    this.later();
  }

  /** Draw once before the next frame, however often it is asked for. */
  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  layOut() {
    const { n, m, rows, columns } = this.sheeted;
    const room = this.element.clientWidth;
    if (!room) return;
    const pen = this.canvas.getContext("2d");
    const { fontSize, fontFamily } = getComputedStyle(this.element);
    this.font = `${fontSize} ${fontFamily}`;
    pen.font = `600 ${this.font}`; // as a marked label is written
    const longest = (labels) => Math.min(LONGEST, Math.max(8, ...labels.map((label) => pen.measureText(label).width)));
    this.left = Math.min(Math.ceil(longest(rows)), Math.floor(room * 0.3)) + 2 * GAP;
    const across = longest(columns);
    const limit = Math.max(280, innerHeight - HEADROOM);
    const slanted = -Math.sin(SLANT) * across + 14;
    const cellIn = (wide, high) =>
      Math.min(
        LARGEST,
        Math.max(SMALLEST, Math.floor(wide / Math.max(m, 1))),
        Math.max(ROOMY, Math.floor(high / Math.max(n, 1))),
      );
    this.cell = cellIn(room - this.left, limit - 26);
    // Labels lie flat where they have room, else they are slanted and need some of it to the right.
    this.flat = across + 6 <= this.cell;
    const overhang = this.flat ? 0 : Math.cos(SLANT) * across;
    if (!this.flat) this.cell = cellIn(room - this.left - overhang, limit - slanted - GAP);
    this.top = Math.ceil(this.flat ? 20 : slanted) + GAP;
    const wide = this.left + m * this.cell + overhang;
    const high = this.top + n * this.cell + 1;
    this.space.style.width = `${wide}px`;
    this.space.style.height = `${high}px`;
    this.element.style.height = `${Math.min(high, limit) + 12}px`; // 12: room for a scroll bar
    const [seenWide, seenHigh] = [Math.min(room, wide), Math.min(high, limit)];
    const dense = devicePixelRatio || 1;
    this.canvas.width = Math.round(seenWide * dense);
    this.canvas.height = Math.round(seenHigh * dense);
    this.canvas.style.width = `${seenWide}px`;
    this.canvas.style.height = `${seenHigh}px`;
    this.seen = { wide: seenWide, high: seenHigh, dense };
    // For whoever points at cells from outside.
    this.element.dataset.cells = JSON.stringify([this.left, this.top, this.cell]);
    this.draw();
  }

  draw() {
    if (!this.seen) return;
    const { n, m, rows, columns, weight, full, closed, over } = this.sheeted;
    const { cell, left, top, seen } = this;
    const pen = this.canvas.getContext("2d");
    const [sx, sy] = [this.element.scrollLeft, this.element.scrollTop];
    const x = (j) => left + j * cell - sx;
    const y = (i) => top + i * cell - sy;
    const first = (scroll) => Math.max(0, Math.floor(scroll / cell));
    const [i0, j0] = [first(sy), first(sx)];
    const i1 = Math.min(n, Math.ceil((sy + seen.high - top) / cell));
    const j1 = Math.min(m, Math.ceil((sx + seen.wide - left) / cell));
    pen.setTransform(seen.dense, 0, 0, seen.dense, 0, 0);
    pen.clearRect(0, 0, seen.wide, seen.high);
    pen.save();
    pen.beginPath();
    pen.rect(left - 2, top - 2, seen.wide, seen.high);
    pen.clip();
    const inner = cell - 1;
    const hatched = hatch(pen);
    pen.fillStyle = styled("lattice");
    pen.fillRect(x(j0), y(i0), (j1 - j0) * cell - 1, (i1 - i0) * cell - 1);
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const shut = closed(i, j);
        pen.fillStyle = inkOf(shut ? 0 : weight(i, j) / full);
        pen.fillRect(x(j), y(i), inner, inner);
        if (!shut) continue;
        pen.fillStyle = hatched;
        pen.fillRect(x(j), y(i), inner, inner);
      }
    }
    over?.(
      pen,
      (j) => x(j) + inner / 2,
      (i) => y(i) + inner / 2,
      cell,
    );
    this.drawMarks(pen, x, y, inner, m, n);
    pen.restore();
    this.drawLabels(pen, rows, columns, x, y, [i0, i1], [j0, j1]);
  }

  drawMarks(pen, x, y, inner, m, n) {
    const { row, column } = this.marks;
    pen.strokeStyle = styled("mark");
    pen.lineWidth = 1.5;
    if (row >= 0 && column >= 0) pen.strokeRect(x(column) - 1, y(row) - 1, inner + 2, inner + 2);
    else if (row >= 0) pen.strokeRect(x(0) - 1, y(row) - 1, m * this.cell + 1, inner + 2);
    else if (column >= 0) pen.strokeRect(x(column) - 1, y(0) - 1, inner + 2, n * this.cell + 1);
  }

  drawLabels(pen, rows, columns, x, y, [i0, i1], [j0, j1]) {
    const { cell, left, top, seen } = this;
    const [text, quiet, bold] = [styled("text"), styled("quiet"), `600 ${this.font}`];
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(0, top, left, seen.high);
    pen.clip();
    pen.textAlign = "right";
    for (let i = i0; i < i1; i++) {
      const on = i === this.marks.row;
      pen.font = on ? bold : this.font;
      pen.fillStyle = on ? text : quiet;
      pen.fillText(clipped(pen, rows[i], left - 2 * GAP), left - GAP, y(i) + cell / 2);
    }
    pen.restore();
    pen.save();
    pen.beginPath();
    pen.rect(left - GAP, 0, seen.wide, top);
    pen.clip();
    for (let j = j0; j < j1; j++) {
      if (x(j) < left - cell / 2) continue;
      const on = j === this.marks.column;
      pen.font = on ? bold : this.font;
      pen.fillStyle = on ? text : quiet;
      pen.save();
      pen.translate(x(j) + cell / 2, top - GAP);
      if (!this.flat) pen.rotate(SLANT);
      pen.textAlign = this.flat ? "center" : "left";
      pen.fillText(this.flat ? columns[j] : clipped(pen, columns[j], LONGEST), 0, this.flat ? -6 : 0);
      pen.restore();
    }
    pen.restore();
  }

  /** The cell under the pointer; −1 in one place on a label, in both on nothing. @returns {[number, number]} */
  cellAt(event) {
    if (!this.seen) return [-1, -1];
    const box = this.element.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const i = py < this.top ? -1 : Math.floor((py - this.top + this.element.scrollTop) / this.cell);
    const j = px < this.left ? -1 : Math.floor((px - this.left + this.element.scrollLeft) / this.cell);
    return i >= this.sheeted.n || j >= this.sheeted.m ? [-1, -1] : [i, j];
  }

  /** Scroll to a cell that is not in sight. */
  reveal(i, j) {
    if (!this.seen) return;
    const { element, cell, seen } = this;
    const into = (at, scroll, room) => (at < scroll || at + cell > scroll + room ? at - (room - cell) / 2 : scroll);
    if (i >= 0) element.scrollTop = into(i * cell, element.scrollTop, seen.high - this.top);
    if (j >= 0) element.scrollLeft = into(j * cell, element.scrollLeft, seen.wide - this.left);
  }
}

/** The text, or as much of its beginning as fits, and an ellipsis. */
function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && pen.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}
