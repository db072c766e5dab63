// Controls of the explorer of losses: one per number, flag or choice, each with a label.

import { h } from "./looks.js";

let count = 0;

/**
 * @typedef {{element: HTMLElement, show: (value: any) => void}} Control
 * @param {import("./explorer.js").Field & {title?: string, ratio?: boolean}} field
 *   `ratio`: the slider is logarithmic
 * @param {(value: any) => void} changed  a number, a truth value, a text, or null for "off"
 * @returns {Control}
 */
export function control(field, changed) {
  if (field.kind === "flag") return flag(field, changed);
  if (field.kind === "choice") return choice(field, changed);
  return slider(field, changed);
}

function flag(field, changed) {
  const box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", name: field.name }));
  box.addEventListener("change", () => changed(box.checked));
  const element = h("div", { class: "xl-field", "data-field": field.name }, h("label", { class: "xl-tick" }, box, named(field)));
  return { element, show: (value) => (box.checked = Boolean(value)) };
}

function choice(field, changed) {
  const id = `xl-field-${(count += 1)}`;
  const options = field.choices.map((name) => h("option", { value: name }, name));
  const select = /** @type {HTMLSelectElement} */ (h("select", { id, name: field.name }, ...options));
  select.addEventListener("change", () => changed(select.value));
  const element = h("div", { class: "xl-field", "data-field": field.name }, h("label", { for: id }, named(field)), select);
  return { element, show: (value) => (select.value = value) };
}

/** A range and the number beside it, in which anything can be typed; a switch where it may be off. */
function slider(field, changed) {
  const id = `xl-field-${(count += 1)}`;
  const { low, high, step, ratio = false } = field;
  const title = field.title ?? field.name;
  const there = ratio ? Math.exp : Number;
  const range = /** @type {HTMLInputElement} */ (h("input", { id, type: "range", min: low, max: high, step }));
  const text = /** @type {HTMLInputElement} */ (h("input", { type: "text", inputmode: "decimal", "aria-label": `${title}, as a number`, autocomplete: "off", spellcheck: "false" }));
  let value = null;
  const tell = (next) => {
    show(next);
    changed(next);
  };
  range.addEventListener("input", () => tell(tidy(there(Number(range.value)))));
  text.addEventListener("change", () => {
    const typed = text.value.trim();
    tell(typed !== "" && Number.isFinite(Number(typed)) ? Number(typed) : typed);
  });
  const parts = [range, text];
  let box = null;
  if (field.on !== null && field.on !== undefined) {
    box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", "aria-label": `${title} is on` }));
    let before = field.on;
    box.addEventListener("change", () => {
      if (!box.checked) before = value;
      tell(box.checked ? before : null);
    });
  }
  function show(next) {
    value = next;
    const off = next === null;
    if (box) box.checked = !off;
    range.disabled = text.disabled = off;
    const number = typeof next === "number" ? next : NaN;
    const at = ratio ? Math.log(number) : number;
    if (Number.isFinite(at)) range.value = String(at);
    range.setAttribute("aria-valuetext", off ? "off" : String(next));
    const written = off ? "off" : String(next);
    if (text.value !== written) text.value = written;
  }
  const label = h("label", { for: id }, named(field));
  const head = box ? h("span", { class: "xl-switch" }, box, label) : label;
  return { element: h("div", { class: "xl-field", "data-field": field.name }, head, ...parts), show };
}

/** Four digits: what a slider says should not have twenty. @param {number} value */
export function tidy(value) {
  return Number(value.toPrecision(4));
}

function named(field) {
  return field.title ? document.createTextNode(field.title) : h("code", {}, field.name);
}
