/** Numbers as pictures: one pixel a number, which the browser makes larger. */

import { make, tokenText } from "./dom.js";
import { inks } from "./ink.js";
import { short } from "./numbers.js";

const MOST_TICKS = 24; // more labels have no room under a picture

/**
 * Paint rows × columns of numbers onto a canvas. What is closed stays clear, so that the hatching behind it is seen.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{rows: number, columns: number, value: (i: number, j: number) => number,
 *          closed?: (i: number, j: number) => boolean, kind: "weight"|"signed", most: number}} picture
 *     `most` is the number that has full ink
 */
export function paint(canvas, { rows, columns, value, closed, kind, most }) {
  canvas.width = columns;
  canvas.height = rows;
  if (!rows || !columns) return;
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  const colours = inks(kind);
  const [low, span] = kind === "signed" ? [-most, 2 * most] : [0, most];
  for (let i = 0, at = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, at += 4) {
      if (closed?.(i, j)) continue;
      const place = span ? (value(i, j) - low) / span : kind === "signed" ? 0.5 : 0;
      const colour = colours[Math.round(255 * Math.min(1, Math.max(0, place)))];
      image.data[at] = colour[0];
      image.data[at + 1] = colour[1];
      image.data[at + 2] = colour[2];
      image.data[at + 3] = 255;
    }
  }
  pen.putImageData(image, 0, 0);
}

/** The largest absolute value. @param {ArrayLike<number>} numbers */
export function largest(numbers) {
  let most = 0;
  for (let i = 0; i < numbers.length; i++) most = Math.max(most, Math.abs(numbers[i]));
  return most;
}

/** Whether any is below 0. @param {ArrayLike<number>} numbers */
export function anyNegative(numbers) {
  for (let i = 0; i < numbers.length; i++) if (numbers[i] < 0) return true;
  return false;
}

/** A vector as a thin strip, a column a number. @param {string} name */
export function vectorStrip(name) {
  return make("canvas", { class: "vector", role: "img", "aria-label": name });
}

/** @param {HTMLCanvasElement} canvas @param {ArrayLike<number>} vector @param {number} [most] */
export function paintVector(canvas, vector, most = largest(vector)) {
  paint(canvas, { rows: 1, columns: vector.length, value: (_, j) => vector[j], kind: "signed", most });
}

/**
 * A picture of a grid of numbers with its name above, and the number under the pointer told below.
 *
 * @param {{name: string, rows: number, columns: number, numbers: Float32Array, down: (i: number) => string,
 *          across: (j: number) => string, ticks?: string[], flip?: boolean, most?: number, height?: number}} grid
 *     `ticks` are labels of the columns as drawn; `flip` draws rows across and columns down
 */
export function heatPicture({ name, rows, columns, numbers, down, across, ticks = [], flip = false, most, height }) {
  const canvas = make("canvas", { class: "heat", role: "img", "aria-label": name });
  const told = make("output", { class: "readout" }, "\u00a0");
  const at = flip ? (i, j) => numbers[j * columns + i] : (i, j) => numbers[i * columns + j];
  const [high, wide] = flip ? [columns, rows] : [rows, columns];
  const signed = anyNegative(numbers);
  const full = most ?? Math.max(largest(numbers), signed ? 0 : 1);
  const draw = () =>
    paint(canvas, { rows: high, columns: wide, value: at, kind: signed ? "signed" : "weight", most: full });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const j = Math.min(wide - 1, Math.floor(((event.clientX - box.left) / box.width) * wide));
    const i = Math.min(high - 1, Math.floor(((event.clientY - box.top) / box.height) * high));
    if (i >= 0 && j >= 0) told.textContent = `${across(j)}, ${down(i)}: ${short(at(i, j))}`;
  });
  canvas.addEventListener("pointerleave", () => (told.textContent = "\u00a0"));
  canvas.style.height = `${height ?? Math.min(220, Math.max(24, high * 6))}px`;
  draw();
  const marks =
    ticks.length <= MOST_TICKS ? [make("div", { class: "ticks", "aria-hidden": "true" }, ...ticks.map(tokenText))] : [];
  return { element: make("figure", { class: "picture" }, make("h3", {}, name), canvas, ...marks, told), draw };
}
