/** Numbers as the page writes them. */

/** Two digits behind the point. @param {number} x */
export function two(x) {
  return minus((Math.round(x * 100) / 100 + 0).toFixed(2));
}

/** Two digits behind the point where there is room. @param {number} x */
export function short(x) {
  return Math.abs(x) < 99.995 ? two(x) : minus(x.toFixed(0));
}

/** A probability: to two digits, a small one to three. @param {number|null} p */
export function share(p) {
  if (p === null || p === undefined) return "–";
  if (p >= 0.01 || p === 0) return two(p);
  return p >= 0.0005 ? p.toFixed(3) : "<0.001";
}

/** A difference or a very small number: 3·10⁻⁷. @param {number} x */
export function tiny(x) {
  if (x === 0) return "0";
  if (Math.abs(x) >= 0.01) return two(x);
  const [digits, power] = x.toExponential(0).split("e");
  return `${minus(digits)}·10${[...minus(String(Number(power)))].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("")}`;
}

/** "1 head", "3 heads". @param {number} n @param {string} what */
export function count(n, what) {
  return `${n} ${what}${n === 1 ? "" : "s"}`;
}

function minus(text) {
  return text.replace("-", "−");
}
