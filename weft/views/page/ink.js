/** Colours: one hue for weights, from the paper (0) to full (1); two around 0; and a set of eight for heads. */

/** Stops in even steps of lightness, the light ones as in the figures. */
export const INKS = {
  light: { weight: ["#ffffff", "#5f97cb", "#0a2f66"], signed: ["#a8430f", "#ffffff", "#0a2f66"] },
  dark: { weight: ["#14171c", "#4479ad", "#d3e7ff"], signed: ["#f2a15f", "#14171c", "#a8d0ff"] },
};

// Told apart without colour vision (Okabe and Ito 2008), and by their dashes too.
const HEADS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a8a"],
  dark: ["#3d9fe0", "#ef7a26", "#1fbf92", "#dd94bd", "#8fd0f7", "#f0b429", "#f4f4f4", "#9a9a9a"],
};
const DASHES = ["", "7 3", "7 3 1.5 3", "1.5 3", "12 3", "3 3", "7 2 1.5 2 1.5 2", "14 5"];

// Asked once: a colour is wanted for every cell.
const systemIsDark = globalThis.matchMedia?.("(prefers-color-scheme: dark)");

/** "light" or "dark", as the page is now. */
export function scheme() {
  return document.documentElement.dataset.theme || (systemIsDark.matches ? "dark" : "light");
}

/** @param {string} colour */
function channels(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

/**
 * 256 colours between stops.
 *
 * @param {string[]} stops
 * @returns {number[][]} [red, green, blue] of each
 */
export function ramp(stops) {
  const colours = stops.map(channels);
  return Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (colours.length - 1);
    const from = Math.min(Math.floor(place), colours.length - 2);
    return colours[from].map((value, c) => Math.round(value + (place - from) * (colours[from + 1][c] - value)));
  });
}

const ramps = new Map();

/** The 256 colours of "weight" or "signed" in the present scheme. @param {"weight"|"signed"} kind */
export function inks(kind) {
  const name = `${kind} ${scheme()}`;
  if (!ramps.has(name)) ramps.set(name, ramp(INKS[scheme()][kind]));
  return ramps.get(name);
}

/** The colour of a weight from 0 to 1. @param {number} weight */
export function inkOf(weight) {
  return rgb(inks("weight")[Math.round(255 * Math.min(1, Math.max(0, weight)))]);
}

/** @param {number[]} colour */
export function rgb(colour) {
  return `rgb(${colour.join(" ")})`;
}

/** Black or white, whichever is read better on the colour of a weight: at least 4.5:1. @param {number} weight */
export function textOn(weight) {
  const colour = inks("weight")[Math.round(255 * Math.min(1, Math.max(0, weight)))];
  const light = luminance(colour);
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000" : "#fff";
}

/** Relative luminance (WCAG). @param {number[]} colour */
export function luminance(colour) {
  const [r, g, b] = colour.map((value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** The stroke of a head: colour and dash; heads that share a colour differ in the dash. @param {number} head */
export function strokeOf(head) {
  const round = Math.floor(head / HEADS.light.length);
  return { colour: HEADS[scheme()][head % HEADS.light.length], dash: DASHES[(head + round) % DASHES.length] };
}

/** A colour that the style sheet names. @param {string} name */
export function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Hatching for cells where a query may not look. @param {CanvasRenderingContext2D} context */
export function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = styled("hatch");
  pen.lineWidth = 1;
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
