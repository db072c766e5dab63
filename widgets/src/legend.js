// What the colours and marks of tokens mean.

import { h, number } from "./looks.js";
import { FLAGS, LEVELS, SIDES } from "./scales.js";

/**
 * @param {import("./scales.js").Measure} measure
 * @param {{from: number, to: number} | null} range
 * @param {{flags: number, missing: boolean, read: boolean, texts: number}} found  marks that there are, whether a token lacks a value, whether an environment wrote some, texts that are shown
 * @returns {HTMLElement}
 */
export function legendOf(measure, range, { flags, missing, read, texts }) {
  const parts = [];
  if (!range) parts.push(h("span", { class: "xl-unit" }, `no token has this value: ${measure.long}`));
  else {
    const names = [];
    if (measure.kind === "signed") for (let i = -SIDES; i <= SIDES; i += 1) names.push(`d${i}`);
    else for (let i = 0; i <= LEVELS; i += 1) names.push(`s${i}`);
    if (measure.kind === "low") names.reverse();
    const back = measure.back ?? ((place) => place);
    const middle = measure.kind === "signed" ? [h("span", { class: "xl-middle" }, number(back(0)))] : [];
    parts.push(
      h("span", { class: "xl-scale" },
        h("span", {}, number(back(range.from))),
        h("span", { class: "xl-ramp", "aria-hidden": "true" }, ...names.map((name) => h("i", { class: `xl-${name}` })), ...middle),
        h("span", {}, `${number(back(range.to))}${measure.unit ? ` ${measure.unit}` : ""}`)),
      h("span", { class: "xl-unit xl-reach", title: measure.long }, measure.whole ? measure.long : `reaches to the ${measure.kind === "low" ? "2nd" : "98th"} percentile of ${texts > 1 ? "what is shown" : "this rollout"}`),
    );
  }
  if (missing && range) parts.push(h("span", { class: "xl-key" }, h("span", { class: "xl-t xl-void" }, "abc"), " no value"));
  if (read) parts.push(h("span", { class: "xl-key", title: "The environment wrote it: the model read it, and is not trained on it" }, h("span", { class: "xl-t xl-read" }, "abc"), " from the environment"));
  for (const { bit, key, title, long } of FLAGS) {
    if (flags & bit) parts.push(h("span", { class: "xl-key", title: long }, h("span", { class: `xl-t xl-s0 xl-${key}` }, "abc"), ` ${title}`));
  }
  return h("div", { class: "xl-key-row", role: "note", "aria-label": "Legend" }, ...parts);
}
