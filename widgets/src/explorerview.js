// The explorer of losses in the page: what can be set on the left, curves and numbers on the right.

import { CurvePlot } from "./curveplot.js";
import { control, tidy } from "./explorerfields.js";
import { h, number } from "./looks.js";

/** The token's own fields; the last two are there only where the loss reads them. */
const TOKEN = [
  { name: "ratio", title: "ratio r", kind: "number", low: -2.08, high: 2.08, step: 0.01, ratio: true, default: 1 },
  { name: "advantage", title: "advantage A", kind: "number", low: -3, high: 3, step: 0.05, default: 1 },
  { name: "old_logprob", title: "old logprob", kind: "number", low: -10, high: 0, step: 0.1, default: -3 },
  { name: "rollout_gap", title: "old − rollout logprob", kind: "number", low: -3, high: 3, step: 0.05, default: 0, needs: "rollout_logprobs" },
  { name: "ref_gap", title: "old − reference logprob", kind: "number", low: -3, high: 3, step: 0.05, default: 0, needs: "ref_logprobs" },
];
const WORDS = { value: "value", gradient: "gradient", clipped: "clipped", masked: "masked", tis_weight: "TIS weight", tis_clipped: "TIS weight cut", kl: "KL to the reference" };
const PLOTS = [
  { title: "Value of the loss at this token", column: "values", mark: "value", look: 0 },
  { title: "Gradient by the token's logprob", column: "gradients", mark: "gradient", look: 1 },
];
const DEAF = "The kernel does not answer: run the cell again for controls that work.";

export class ExplorerView {
  /**
   * @param {HTMLElement} root
   * @param {any} state shared by all views of the model: see explorer.js
   * @param {() => void} want asks for the curve of what the controls say
   * @param {() => void} drawAll draws all views of the model
   */
  constructor(root, state, want, drawAll) {
    this.state = state;
    this._want = want;
    this._loss = "";
    this._select = /** @type {HTMLSelectElement} */ (h("select", { name: "loss" }, ...state.forms.map(({ name }) => h("option", { value: name }, name))));
    this._select.addEventListener("change", () => this._set((wish) => (wish.loss = this._select.value)));
    this._about = h("p", { class: "xl-about" });
    this._formula = h("pre", { class: "xl-formula", "aria-label": "Formula" });
    this._token = new Map(TOKEN.map((field) => [field.name, control(/** @type {any} */ (field), (value) => this._set((wish) => (wish.token[field.name] = value)))]));
    this._params = new Map();
    this._fields = h("div", { class: "xl-fields" });
    this._legend = h("legend", {});
    this._error = h("p", { class: "xl-wrong", role: "alert" });
    this._numbers = h("dl", { class: "xl-numbers" });
    this._spoken = h("p", { class: "xl-hidden", "aria-live": "polite" });
    this._keptWord = h("span", { class: "xl-keptword" });
    this._plots = PLOTS.map((what) => new CurvePlot(/** @type {any} */ (what), (ratio) => this._set((wish) => (wish.token.ratio = tidy(ratio)))));
    const reset = h("button", { type: "button", class: "xl-button", title: "Parameters and token as they are by default" }, "Defaults");
    reset.addEventListener("click", () => this._reset());
    this._keep = h("button", { type: "button", class: "xl-button", "aria-pressed": "false", title: "Leave this curve behind the next ones, dashed and grey" }, "Keep this curve");
    this._keep.addEventListener("click", () => {
      state.kept = state.kept ? null : state.curve;
      drawAll();
    });
    const left = h(
      "div",
      { class: "xl-left" },
      h("label", { class: "xl-choose" }, "Loss ", this._select),
      this._about,
      this._formula,
      h("fieldset", {}, h("legend", {}, "The token"), h("div", { class: "xl-fields" }, ...[...this._token.values()].map((c) => c.element))),
      h("fieldset", {}, this._legend, this._fields),
      h("div", { class: "xl-buttons" }, reset, this._keep),
    );
    const right = h("div", { class: "xl-right" }, this._error, ...this._plots.map((plot) => plot.element), this._keptWord, this._numbers, this._spoken);
    root.append(h("div", { class: "xl-sides" }, left, right));
    this._watch = new ResizeObserver(() => this._drawPlots());
    this._watch.observe(right);
    this.draw();
  }

  /** Write everything anew. */
  draw() {
    const { wish, curve, error, deaf } = this.state;
    const form = this.state.forms.find(({ name }) => name === wish.loss);
    if (form && form.name !== this._loss) this._build(form);
    this._select.value = wish.loss;
    const params = wish.params[wish.loss] ?? {};
    for (const [name, field] of this._params) {
      if (name in params) this._show(field, params[name]);
    }
    for (const { name, needs } of TOKEN) {
      const field = this._token.get(name);
      this._show(field, wish.token[name]);
      if (needs) field.element.hidden = !curve.needs.includes(needs);
    }
    this._error.textContent = error || (deaf ? DEAF : "");
    this._error.parentElement?.classList.toggle("xl-stale", Boolean(error));
    const { kept } = this.state;
    this._keep.textContent = kept ? "Drop the kept curve" : "Keep this curve";
    this._keep.setAttribute("aria-pressed", String(Boolean(kept)));
    this._keptWord.textContent = kept ? `dashed, grey: ${said(kept)}` : "";
    this._drawNumbers();
    this._drawPlots();
  }

  destroy() {
    this._watch.disconnect();
  }

  /** A field is left alone while somebody types in it. */
  _show(field, value) {
    const active = document.activeElement;
    if (active instanceof HTMLInputElement && active.type === "text" && field.element.contains(active) && this.state.busy) return;
    field.show(value);
  }

  /** @param {(wish: any) => void} change */
  _set(change) {
    const { wish } = this.state;
    change(wish);
    wish.params[wish.loss] ??= {};
    this._want();
    this.draw();
  }

  _reset() {
    this._set((wish) => {
      const form = this.state.forms.find(({ name }) => name === wish.loss);
      wish.params[wish.loss] = Object.fromEntries(form.params.map((field) => [field.name, field.default]));
      for (const field of TOKEN) wish.token[field.name] = field.default;
    });
  }

  /** The controls of a loss. @param {import("./explorer.js").Form} form */
  _build(form) {
    this._loss = form.name;
    this._about.textContent = form.about;
    this._formula.textContent = form.formula;
    this._legend.replaceChildren("Parameters of ", h("code", {}, form.name));
    const kept = this.state.wish.params[form.name] ?? {};
    this._params = new Map(form.params.map((field) => [field.name, control(field, (value) => this._set((wish) => (wish.params[form.name][field.name] = value)))]));
    this._fields.replaceChildren(...[...this._params.values()].map((c) => c.element));
    for (const field of form.params) this._params.get(field.name).show(kept[field.name] ?? field.default);
  }

  _drawNumbers() {
    const { curve } = this.state;
    const rows = Object.entries(WORDS).filter(([name]) => name in curve.mark);
    const pair = (name, word, text, extra = "") => h("div", { "data-number": name, class: extra }, h("dt", {}, word), h("dd", {}, text));
    const metrics = Object.entries(curve.metrics).filter(([name]) => name.startsWith("kl_sample") || name === "entropy_sample");
    this._numbers.replaceChildren(
      pair("ratio", "ratio", number(curve.mark.ratio)),
      ...rows.map(([name, word]) => {
        const value = curve.mark[name];
        const text = typeof value === "boolean" ? (value ? "yes" : "no") : number(value);
        return pair(name, word, text, value === true ? "xl-yes" : "");
      }),
      ...metrics.map(([name, value]) => pair(name, name, number(value))),
    );
    const spoken = said(curve);
    if (this._spoken.textContent !== spoken) this._spoken.textContent = spoken;
  }

  _drawPlots() {
    for (const plot of this._plots) plot.draw(this.state.curve, this.state.kept);
  }
}

/** A curve in words. @param {import("./explorer.js").Curve} curve */
export function said(curve) {
  const { ratio, value, gradient, clipped, masked } = curve.mark;
  const words = [`ratio ${number(ratio)}`, `advantage ${number(curve.token.advantage)}`, `value ${number(value)}`, `gradient ${number(gradient)}`];
  if (clipped) words.push("clipped");
  if (masked) words.push("masked");
  return `${curve.loss}: ${words.join(", ")}`;
}
