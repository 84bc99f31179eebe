/**
 * Arrays as the page carries them: whole numbers in base64 and what one of them stands for.
 *
 * @typedef {{shape: number[], form: "f32"|"i16"|"u16"|"u8"|"bits", scale?: number, data: string}} Packed
 */

const FORMS = { f32: Float32Array, i16: Int16Array, u16: Uint16Array, u8: Uint8Array };

/** @param {string} text @returns {Uint8Array} */
function bytesOf(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/**
 * The numbers of a packed array, row by row.
 *
 * @param {Packed} packed
 * @returns {Float32Array}
 */
export function unpack(packed) {
  const whole = new FORMS[packed.form](bytesOf(packed.data).buffer);
  if (whole instanceof Float32Array) return whole;
  const numbers = new Float32Array(whole.length);
  for (let i = 0; i < whole.length; i++) numbers[i] = whole[i] * packed.scale;
  return numbers;
}

/**
 * Where a packed array of booleans is false: 1 there, 0 elsewhere.
 *
 * @param {Packed} packed
 * @returns {Uint8Array}
 */
export function unpackClosed(packed) {
  const bytes = bytesOf(packed.data);
  const closed = new Uint8Array(packed.shape.reduce((a, b) => a * b, 1));
  for (let i = 0; i < closed.length; i++) closed[i] = ((bytes[i >> 3] >> (i & 7)) & 1) ^ 1;
  return closed;
}
