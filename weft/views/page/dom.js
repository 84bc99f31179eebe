/** Elements, made without ever reading text as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with its attributes, listeners (`onclick`) and children; text stays text.
 *
 * @param {string} tag
 * @param {Object<string, any>} [attributes] undefined and false leave an attribute out
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function make(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

/** The same for SVG. @returns {SVGElement} */
export function makeSvg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** A token's text in any script, kept apart from the writing direction around it. @param {string} label */
export function tokenText(label) {
  return make("bdi", { class: "token", dir: "auto" }, label);
}

/** A list of rows with a bar each: what, how much, and how it is written. */
export class Bars {
  /** @param {number} rows how many there is room for: the room stays, so that nothing moves @param {string} name */
  constructor(rows, name) {
    this.rows = Array.from({ length: rows }, () => {
      const what = make("span", { class: "bar-what" });
      const ink = make("span", { class: "bar-ink" });
      const number = make("span", { class: "bar-number" });
      return { what, ink, number, row: make("li", {}, what, make("span", { class: "bar" }, ink), number) };
    });
    this.element = make("ol", { class: "bars", "aria-label": name }, ...this.rows.map(({ row }) => row));
  }

  /** @param {{label: string, part: number, text: string, strong?: boolean}[]} items */
  show(items) {
    this.rows.forEach(({ what, ink, number, row }, i) => {
      const item = items[i];
      row.classList.toggle("empty", !item);
      row.classList.toggle("strong", Boolean(item?.strong));
      what.replaceChildren(item ? tokenText(item.label) : "");
      ink.style.width = `${100 * Math.min(1, Math.max(0, item?.part ?? 0))}%`;
      number.textContent = item?.text ?? "";
    });
  }
}

/** A line of text with tokens in it: strings are text, `{token}` a token. @param {(string|{token: string})[]} parts */
export function sentence(parts) {
  return parts.map((part) => (typeof part === "string" ? part : tokenText(part.token)));
}
