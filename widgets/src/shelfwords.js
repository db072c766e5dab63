// Words and fields of the browser of checkpoints.

import { duration, h } from "./looks.js";

/** A field of a form; JupyterLab's shortcuts are kept from it as from what `h` makes focusable. */
export const field = (tag, attributes, ...children) => h(tag, { "data-lm-suppress-shortcuts": "true", ...attributes }, ...children);

/** @param {number | null | undefined} bytes */
export function size(bytes) {
  if (bytes === null || bytes === undefined || !Number.isFinite(bytes)) return "–";
  let value = bytes;
  let unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    value /= 1000;
    unit = larger;
  }
  return `${unit === "B" || value >= 9.95 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
}

/** How long ago something was, or how far it is off. @param {number} seconds */
export function span(seconds) {
  if (seconds < 60) return "<1 min";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** A moment by the clock of this machine. @param {number | null} seconds */
export function moment(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "–" : date.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

const UNSEEN = /[\p{Cf}\p{Zl}\p{Zp}\p{Cs}\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0]|[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/gu;
/** Joins what stands before and behind it to one shape, such as a family of emoji. */
const JOINS = /[\p{L}\p{M}\p{Extended_Pictographic}\u{1f3fb}-\u{1f3ff}]$/u;

/**
 * Text in which nothing hides: what has no shape of its own, or turns the line around, is spelt.
 * @param {string} text
 */
export const shown = (text) =>
  text.replace(UNSEEN, (c, at) => {
    const joins = (c === "\u200c" || c === "\u200d") && JOINS.test(text.slice(Math.max(0, at - 2), at));
    return joins ? c : `⟨${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });

/** A metric's name, whose line may break behind a colon. @param {string} name */
export const breaking = (name) => shown(name).replace(/[:/]/g, "$&\u200b");

/**
 * Prompts out of a field: one per line, or, where a line is empty, separated by empty lines.
 * @param {string} text
 */
export function prompts(text) {
  const unified = text.replace(/\r\n?/g, "\n");
  const parts = /\n[ \t]*\n/.test(unified.trim()) ? unified.split(/\n(?:[ \t]*\n)+/) : unified.split("\n");
  return parts.map((part) => part.replace(/^\n+|\n+$/g, "")).filter((part) => part.trim());
}

/**
 * Work that takes a while: says what goes on and for how long, then what came of it.
 * @param {HTMLElement} note
 * @param {string} doing
 * @param {() => Promise<{content: any}>} work
 * @returns {Promise<any>} the answer; null if it was an error, which the note then says
 */
export async function working(note, doing, work) {
  const begun = performance.now();
  const elapsed = () => (performance.now() - begun) / 1000;
  const said = h("span", {}, `${doing} …`);
  // The seconds are not read out: they would interrupt every second.
  const clock = h("span", { class: "xl-clock", "aria-hidden": "true" }, "0 s");
  note.classList.remove("xl-bad");
  note.replaceChildren(h("span", { class: "xl-busy", "aria-hidden": "true" }), said, clock);
  const timer = setInterval(() => (clock.textContent = duration(elapsed())), 500);
  const { content } = await work().finally(() => clearInterval(timer));
  note.classList.toggle("xl-bad", Boolean(content.error));
  note.textContent = content.error ? `✕ ${content.error}` : "";
  return content.error ? null : { ...content, seconds: elapsed() };
}

/**
 * A labelled field.
 * @param {string} label
 * @param {HTMLElement} element
 * @param {string} [more]
 */
export function labelled(label, element, more = "") {
  return h("label", { class: `xl-field ${more}` }, h("span", {}, label), element);
}

/**
 * Fields for how to sample.
 * @param {Record<string, [string, string]>} fields  by name: label and value
 */
export function params(fields) {
  const inputs = Object.entries(fields).map(([name, [label, value]]) => ({
    name,
    label,
    input: /** @type {HTMLInputElement} */ (field("input", { type: "text", inputmode: "decimal", value, spellcheck: "false", autocomplete: "off", class: "xl-short" })),
  }));
  return {
    elements: inputs.map(({ label, input }) => labelled(label, input)),
    inputs: inputs.map(({ input }) => input),
    read: () => Object.fromEntries(inputs.map(({ name, input }) => [name, input.value.replace(",", ".")])),
  };
}
