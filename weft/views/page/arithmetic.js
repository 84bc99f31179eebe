/** The arithmetic of attention, done again in the page from what was recorded, and what is measured of weights. */

/**
 * One query's way through a head: softmax over the open keys of scale · q·k + bias, then the sum of weighted values.
 *
 * @param {{q: Float32Array, keys: Float32Array, values: Float32Array|null, scale: number,
 *          bias: (j: number) => number, closed: (j: number) => boolean}} head `q` has d numbers, `keys` m × d
 * @returns {{dots: number[], scores: number[], weights: number[], output: number[]|null}}
 */
export function lookUp({ q, keys, values, scale, bias, closed }) {
  const d = q.length;
  const m = keys.length / d;
  const dots = Array.from({ length: m }, (_, j) => {
    let sum = 0;
    for (let c = 0; c < d; c++) sum += q[c] * keys[j * d + c];
    return sum;
  });
  const scores = dots.map((dot, j) => (closed(j) ? -Infinity : dot * scale + bias(j)));
  const weights = softmax(scores);
  return { dots, scores, weights, output: values && mix(weights, values) };
}

/** Softmax; all zeros where every score is −∞. @param {number[]} scores */
export function softmax(scores) {
  const most = Math.max(...scores);
  if (most === -Infinity) return scores.map(() => 0);
  const powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

/** Σ weight · value. @param {number[]} weights m of them @param {Float32Array} values m × e */
function mix(weights, values) {
  const width = values.length / weights.length;
  const sum = new Array(width).fill(0);
  weights.forEach((weight, j) => {
    for (let c = 0; c < width; c++) sum[c] += weight * values[j * width + c];
  });
  return sum;
}

/** Entropy of each row in bits, averaged over the rows that look anywhere. @param {Float32Array} weights n × m */
export function entropy(weights, n, m) {
  let sum = 0;
  let rows = 0;
  for (let i = 0; i < n; i++) {
    let bits = 0;
    let whole = 0;
    for (let j = 0; j < m; j++) {
      const w = weights[i * m + j];
      whole += w;
      if (w > 0) bits -= w * Math.log2(w);
    }
    if (whole > 0.5) {
      sum += bits;
      rows++;
    }
  }
  return rows ? sum / rows : 0;
}

/** How far away the rows look, Σ w |i − j| / Σ w. @param {Float32Array} weights n × m */
export function distance(weights, n, m) {
  let sum = 0;
  let whole = 0;
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < m; j++) {
      sum += weights[i * m + j] * Math.abs(i - j);
      whole += weights[i * m + j];
    }
  }
  return whole ? sum / whole : 0;
}

/** The key with the most weight in each row, −1 where a row looks nowhere. @param {Float32Array} weights n × m */
export function strongest(weights, n, m) {
  return Array.from({ length: n }, (_, i) => {
    let best = -1;
    for (let j = 0; j < m; j++) if (weights[i * m + j] > (best < 0 ? 0 : weights[i * m + best])) best = j;
    return best;
  });
}

/**
 * Runs of rows whose keys never step back, and pairs of rows whose keys stand in the opposite order.
 *
 * @param {number[]} keys the strongest key of each row
 */
export function order(keys) {
  const path = keys.filter((key) => key >= 0);
  const back = path.filter((key, i) => i > 0 && key < path[i - 1]).length;
  let crossings = 0;
  for (let i = 0; i < path.length; i++) for (let j = 0; j < i; j++) if (path[j] > path[i]) crossings++;
  return { runs: path.length ? back + 1 : 0, crossings };
}

/** A random order of 0 … count − 1, the same for the same seed; never the old order where there is another. */
export function shuffled(count, seed) {
  const places = Array.from({ length: count }, (_, i) => i);
  let state = (seed * 2654435761 + 0x9e3779b9) >>> 0 || 1;
  const draw = () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 4294967296;
  };
  for (let i = 0; i < 8; i++) draw(); // the first draws of near seeds are alike
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(draw() * (i + 1));
    [places[i], places[j]] = [places[j], places[i]];
  }
  if (count > 1 && places.every((place, i) => place === i)) [places[0], places[1]] = [places[1], places[0]];
  return places;
}
