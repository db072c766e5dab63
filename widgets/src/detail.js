// What is known of one token, and of those that make a character with it.

import { h, number } from "./looks.js";
import { FLAGS, MEASURES, valuesOf } from "./scales.js";
import { literal, visible } from "./visible.js";

const HINT = "Move over a token, or press Tab and then the arrow keys: everything that is known of it is shown here. Home and End, page up and down; N and P find the next and the previous marked token.";
const MOST = 6;

export class Detail {
  /** @param {{resample: (view: any, unit: number) => void}} acts */
  constructor({ resample }) {
    this._body = h("div", { class: "xl-detail-body" }, h("p", { class: "xl-hint" }, HINT));
    this._resample = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "xl-button", disabled: true }, "Resample from here"));
    this._resample.addEventListener("click", () => this._at && resample(this._at.view, this._at.unit));
    this._live = h("div", { class: "xl-hidden", role: "status", "aria-live": "polite" });
    this.element = h("aside", { class: "xl-detail", "aria-label": "The selected token" }, this._body, h("div", { class: "xl-detail-foot" }, this._resample), this._live);
    this._at = null;
  }

  /** @param {string} reason  why nothing can be drawn, empty if it can */
  allow(reason) {
    this._reason = reason;
    this._resample.title = reason || "Draw other continuations of this text, from this token on (key R)";
  }

  clear() {
    this._at = null;
    this._resample.disabled = true;
    this._body.replaceChildren(h("p", { class: "xl-hint" }, HINT));
  }

  /**
   * @param {any} view  a TokenView
   * @param {number} unit
   * @param {{hover?: boolean}} [how]
   */
  show(view, unit, { hover = false } = {}) {
    const { sequence } = view;
    if (!hover) {
      this._at = { view, unit };
      this._resample.disabled = Boolean(this._reason) || !view.branches || sequence.isRead(sequence.start(unit));
    }
    const from = sequence.start(unit);
    const to = sequence.start(unit + 1);
    const tokens = [];
    for (let token = from; token < Math.min(to, from + MOST); token += 1) tokens.push(token);
    const head = to - from > 1 ? h("p", { class: "xl-together" }, `${to - from} tokens make `, shown(sequence.textOf(unit)), to - from > MOST ? `, of which ${MOST} are shown` : "") : "";
    this._body.replaceChildren(head, ...tokens.map((token) => this._token(sequence, token)));
    if (!hover) this._live.textContent = spoken(sequence, from);
  }

  _token(sequence, token) {
    const id = sequence.ids[token];
    const rows = MEASURES.map((measure) => {
      const value = valuesOf(measure, sequence)?.[token];
      const none = value === undefined || Number.isNaN(value);
      if (value === undefined) return "";
      const share = measure.key === "logprob" && !none ? h("span", { class: "xl-unit" }, ` p ${percent(value)}`) : "";
      return h("tr", {}, h("th", { scope: "row", title: measure.long }, measure.title), h("td", { "data-measure": measure.key, "data-value": none ? "" : String(value), title: none ? "" : String(value) }, none ? h("span", { class: "xl-unit" }, "no value") : signed(measure, value), share));
    });
    const others = Object.entries(sequence.values)
      .filter(([name]) => !["logprobs", "advantages", "ratio", "entropies", "flags", "weights"].includes(name))
      .map(([name, values]) => {
        const none = Number.isNaN(values[token]);
        return h("tr", {}, h("th", { scope: "row" }, name.replace(/_/g, " ")), h("td", { "data-stream": name, "data-value": none ? "" : String(values[token]) }, none ? h("span", { class: "xl-unit" }, "no value") : number(values[token])));
      });
    const flags = sequence.flags(token);
    const marks = FLAGS.filter(({ bit }) => flags & bit).map(({ key, title, long }) => h("li", { title: long }, h("span", { class: `xl-t xl-${key}` }, title), ` ${long}`));
    return h(
      "section",
      { class: "xl-token", "data-token": token, "data-id": id },
      h("header", {}, h("code", { class: "xl-piece" }, sequence.spelled ? literal(sequence.piece(token)) : "?"), h("span", { class: "xl-unit" }, ` id ${id} · token ${token + 1} of ${sequence.count}`), sequence.isSpecial(token) ? h("span", { class: "xl-chip" }, "special") : "", sequence.isRead(token) ? h("span", { class: "xl-chip xl-apart", title: "The model read it, and is not trained on it" }, "environment") : ""),
      marks.length ? h("ul", { class: "xl-marks-of" }, ...marks) : "",
      sequence.isRead(token) ? "" : h("table", { class: "xl-values" }, h("tbody", {}, ...rows, ...others)),
      this._alternatives(sequence, token),
    );
  }

  _alternatives(sequence, token) {
    const some = sequence.alternatives(token);
    if (!some.length) return "";
    const id = sequence.ids[token];
    const rank = some.findIndex((one) => one.id === id);
    const drawn = sequence.values.logprobs?.[token];
    const list = [...some];
    if (rank < 0 && drawn !== undefined && !Number.isNaN(drawn)) list.push({ id, logprob: drawn, piece: sequence.piece(token), special: sequence.isSpecial(token) });
    const said = rank < 0 ? `drawn: not among the ${some.length} most likely` : rank === 0 ? "drawn: the most likely" : `drawn: number ${rank + 1} of the most likely`;
    return h(
      "div",
      { class: "xl-alternatives" },
      h("p", { class: "xl-unit" }, said),
      h(
        "ol",
        {},
        ...list.map((one) => {
          const bar = h("span", { class: "xl-bar-of" });
          bar.style.width = `${Math.max(0.5, 100 * Math.exp(one.logprob))}%`;
          return h("li", { class: one.id === id ? "xl-drawn" : "", "data-id": one.id, "data-value": one.logprob, title: `id ${one.id}, logprob ${one.logprob}` }, h("code", {}, literal(one.piece ?? (one.id === id ? sequence.piece(token) : null)) || String(one.id)), h("span", { class: "xl-track" }, bar), h("span", { class: "xl-share" }, percent(one.logprob)));
        }),
      ),
    );
  }
}

function shown(text) {
  return h("bdi", { class: "xl-whole" }, ...visible(text, false).map((part) => (part.mark ? h("i", { class: "xl-sign", title: part.title ?? null }, part.text) : part.text)));
}

function signed(measure, value) {
  return measure.kind === "signed" && measure.key !== "ratio" && value > 0 ? `+${number(value)}` : number(value);
}

/** @param {number} logprob */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (Number.isNaN(share)) return "–";
  if (share >= 99.995 && share < 100) return ">99.99 %";
  if (share >= 10) return `${share.toFixed(1)} %`;
  if (share >= 0.01) return `${share.toPrecision(2)} %`;
  return share > 0 ? "<0.01 %" : "0 %";
}

function spoken(sequence, token) {
  const piece = sequence.spelled ? literal(sequence.piece(token)) : `id ${sequence.ids[token]}`;
  const logprob = sequence.values.logprobs?.[token];
  const flags = FLAGS.filter(({ bit }) => sequence.flags(token) & bit).map(({ title }) => title);
  if (sequence.isRead(token)) return `${piece}, from the environment`;
  return [piece, logprob === undefined ? "" : `logprob ${number(logprob)}`, ...flags].filter(Boolean).join(", ");
}
