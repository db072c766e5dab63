// Other continuations from one token on, beside the one that was recorded.

import { h, number } from "./looks.js";
import { Sequence, arraysOf } from "./sequence.js";
import { TokenView } from "./tokenview.js";

export class Resample {
  /**
   * @param {{ask: import("./channel.js").Ask, view: (label: string) => TokenView, drawn: () => void}} options
   *   `view`: makes a view of tokens whose selection shows in the panel; `drawn`: there is more to colour
   */
  constructor({ ask, view, drawn }) {
    this._ask = ask;
    this._view = view;
    this._drawn = drawn;
    /** @type {TokenView[]} */
    this.views = [];
    const number_ = (label, value, more = {}) => /** @type {HTMLInputElement} */ (h("input", { type: "number", class: "xl-small", "aria-label": label, value, ...more }));
    this._weights = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "weights" }));
    this._n = number_("continuations", 2, { min: 1, max: 16, step: 1 });
    this._temperature = number_("temperature", 1, { min: 0, step: 0.1 });
    this._most = number_("max tokens", 64, { min: 1, step: 1 });
    this._seed = number_("seed", 0, { step: 1 });
    this._go = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", class: "xl-button xl-strong" }, "Draw"));
    this._close = h("button", { type: "button", class: "xl-tool", "aria-label": "Close the continuations", title: "Close" }, "✕");
    this._close.addEventListener("click", () => this.close());
    this._said = h("span", { class: "xl-unit", role: "status", "aria-live": "polite" });
    this._where = h("span", { class: "xl-from" });
    const labelled = (text, element) => h("label", { class: "xl-range" }, h("span", { class: "xl-unit" }, text), element);
    this._form = h("form", { class: "xl-resample-form" }, this._where, labelled("weights", this._weights), labelled("n", this._n), labelled("temperature", this._temperature), labelled("max tokens", this._most), labelled("seed", this._seed), this._go, this._said, h("span", { class: "xl-fill" }), this._close);
    this._form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._draw();
    });
    this._columns = h("div", { class: "xl-branches" });
    this.element = h("section", { class: "xl-resample", "aria-label": "Resample from here", hidden: true }, this._form, this._columns);
  }

  /**
   * @param {{run: number, facts: any, sequence: Sequence}} rollout
   * @param {number} unit  the one that is drawn anew
   */
  async begin(rollout, unit) {
    this._rollout = rollout;
    this._unit = unit;
    const token = rollout.sequence.start(unit);
    this._where.textContent = `From token ${token + 1}, which is drawn anew:`;
    if (this.element.hidden || this._for !== rollout) this._clear();
    this._for = rollout;
    this.element.hidden = false;
    this._go.focus({ preventScroll: true });
    this.element.scrollIntoView({ block: "nearest" });
    const { content } = await this._ask({ kind: "weights" });
    if (content.error || !content.weights?.length) {
      this._say(content.error ?? "there are no weights to draw from", true);
      this._go.disabled = true;
      return;
    }
    this._go.disabled = false;
    const chosen = this._weights.value;
    this._weights.replaceChildren(...content.weights.map((name) => h("option", { value: name }, name)));
    if (content.weights.includes(chosen)) this._weights.value = chosen;
  }

  close() {
    this.element.hidden = true;
    this._clear();
    this._drawn();
  }

  _clear() {
    this.views.forEach((view) => view.destroy());
    this.views = [];
    this._columns.replaceChildren();
    this._say("");
  }

  _say(text, bad = false) {
    this._said.className = bad ? "xl-bad" : "xl-unit";
    this._said.textContent = text;
  }

  async _draw() {
    const { _rollout: rollout, _unit: unit } = this;
    const position = rollout.sequence.start(unit);
    const value = (element) => (element.value.trim() === "" ? null : Number(element.value));
    const params = { n: value(this._n), temperature: value(this._temperature), max_tokens: value(this._most), seed: value(this._seed) };
    const weights = this._weights.value;
    this._go.disabled = true;
    this._say("drawing …");
    const start = performance.now();
    const { content, buffers } = await this._ask({ kind: "resample", run: rollout.run, rollout: rollout.facts.id, position, weights, params });
    this._go.disabled = false;
    if (this._for !== rollout || this.element.hidden) return;
    if (content.error) {
      this._say(content.error, true);
      return;
    }
    this._clear();
    this._say(`${content.drawn.length} drawn from ${weights} in ${number((performance.now() - start) / 1000)} s`);
    const drawn = content.drawn.map((one) => ({ stop: one.stop_reason, sequence: new Sequence(arraysOf(one.arrays, buffers, one.first), { special: one.special, alternatives: one.alternatives }) }));
    const longest = Math.max(0, ...drawn.map(({ sequence }) => rollout.sequence.shared(sequence, position)));
    this._column("recorded", rollout.facts.stop_reason, rollout.sequence, position, unit, drawn.length ? position + longest : -1);
    drawn.forEach(({ stop, sequence }, i) => this._column(`${weights} #${i + 1}`, stop, sequence, 0, 0, rollout.sequence.shared(sequence, position)));
    this._drawn();
  }

  /** One text from the branch on. */
  _column(name, stop, sequence, position, unit, shared) {
    const view = this._view(`Continuation: ${name}`);
    this.views.push(view);
    const logprobs = sequence.values.logprobs?.subarray(position);
    const total = logprobs?.length ? logprobs.reduce((sum, value) => sum + value, 0) : NaN;
    const same = shared - position;
    const said = [`${sequence.count - position} tokens`, stop === "length" ? "cut off" : stop, Number.isNaN(total) ? "" : `logprob ${number(total)}`, shared < 0 ? "" : same > 0 ? `first ${same} shared` : "differs at once"].filter(Boolean).join(" · ");
    this._columns.append(h("div", { class: "xl-branch" }, h("p", { class: "xl-branch-head" }, h("b", {}, name), h("span", { class: "xl-unit" }, ` ${said}`)), view.element));
    view.show(sequence, unit);
    view.shared = shared;
  }
}
