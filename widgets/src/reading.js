// One rollout, or two side by side, token by token.

import { Detail } from "./detail.js";
import { factsOf, notesOf, title } from "./facts.js";
import { kinOf } from "./kin.js";
import { legendOf } from "./legend.js";
import { h } from "./looks.js";
import { Resample } from "./resample.js";
import { MEASURES, colours, measureOf, rangeOf, valuesOf } from "./scales.js";
import { Sequence, arraysOf } from "./sequence.js";
import { TokenView } from "./tokenview.js";
import { visible } from "./visible.js";

const PIECE = 1900;

/**
 * @typedef {{run: number, facts: any, sequence: Sequence, prompt: Sequence, unspelled: string}} Rollout
 */

/** @param {any} content @param {DataView[]} buffers @returns {Rollout} */
export function rolloutOf(content, buffers) {
  const arrays = arraysOf(content.arrays, buffers);
  const more = { special: content.special, alternatives: content.alternatives, advantage: content.facts.advantage };
  return { run: content.run, facts: content.facts, sequence: new Sequence(arrays, more), prompt: new Sequence(arrays, { ...more, prefix: "prompt_" }), unspelled: content.unspelled };
}

export class Reading {
  /**
   * @param {{ask: import("./channel.js").Ask, runs: {name: string}[], reason: string, open: (place: {run: number, id: number}) => void, step: (by: number) => void, closed: () => void, noted: () => void, back: () => void}} options
   */
  constructor({ ask, runs, reason, open, step, closed, noted, back }) {
    this._ask = ask;
    this._runs = runs;
    this._reason = reason;
    this._open = open;
    this._closed = closed;
    this._noted = noted;
    /** @type {Rollout | null} */
    this.main = null;
    /** @type {Rollout | null} */
    this.beside = null;
    this.measure = measureOf("logprob");
    this.raw = false;
    this._detail = new Detail({ resample: (view, unit) => this._branch(view, unit) });
    this._detail.allow(reason);
    /** @type {TokenView[]} */
    this._views = [];
    this._prompts = [];
    this._resample = new Resample({ ask, view: (label) => this._view(label), drawn: () => this._paint() });
    this._build(step, back);
  }

  /** @param {Rollout} rollout */
  show(rollout) {
    this.main = rollout;
    this.beside = null;
    this._draw();
  }

  /** @param {Rollout | null} rollout */
  showBeside(rollout) {
    this.beside = rollout;
    this._draw();
  }

  focus() {
    this._views[0]?.element.focus({ preventScroll: true });
  }

  destroy() {
    [...this._views, ...this._prompts, ...this._resample.views].forEach((view) => view.destroy());
  }

  _build(step, back) {
    const tool = (text, label, act) => {
      const button = h("button", { type: "button", class: "xl-button", title: label, "aria-label": label }, text);
      button.addEventListener("click", act);
      return button;
    };
    this._title = h("h4", {});
    this._datum = tool("Copy as Datum", "Copy Python source of the Datum that a recipe makes of it", () => this._copy());
    this._kinButton = tool("Same prompt", "All rollouts on this prompt, across steps", () => this._kin());
    this._apart = tool("Stop comparing", "Show the first rollout alone", () => this.showBeside(null));
    const head = h("header", { class: "xl-reading-head" }, this._title, h("span", { class: "xl-fill" }), this._apart, this._kinButton, this._datum, tool("‹", "Previous in the table (key ,)", () => step(-1)), tool("›", "Next in the table (key .)", () => step(1)), tool("✕", "Close this rollout", () => this._closed()));
    this._choices = h("div", { class: "xl-segments", role: "radiogroup", "aria-label": "Colour tokens by" });
    for (const measure of MEASURES) {
      const button = h("button", { type: "button", role: "radio", class: "xl-segment", "data-key": measure.key, title: measure.long }, measure.title);
      button.addEventListener("click", () => this._colourBy(measure.key));
      this._choices.append(button);
    }
    this._choices.addEventListener("keydown", (event) => this._chooseByKey(event));
    this._rawBox = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox" }));
    this._rawBox.addEventListener("change", () => {
      this.raw = this._rawBox.checked;
      [...this._views, ...this._prompts, ...this._resample.views].forEach((view) => view.write(this.raw));
    });
    this._legend = h("div", { class: "xl-legend-box" });
    const tools = h("div", { class: "xl-reading-tools" }, h("span", { class: "xl-unit" }, "colour by"), this._choices, h("label", { class: "xl-check", title: "Special tokens, blanks and invisible characters by name" }, this._rawBox, "raw"));
    this._texts = h("div", { class: "xl-texts" });
    this._below = h("div", { class: "xl-below" });
    this._said = h("p", { class: "xl-unit xl-status", role: "status", "aria-live": "polite" });
    this.element = h("section", { class: "xl-reading", "aria-label": "Rollout", hidden: true }, head, tools, this._legend, h("div", { class: "xl-reading-body" }, this._texts, this._detail.element), this._resample.element, this._said, this._below);
    this.element.addEventListener("keydown", (event) => this._key(event, step, back));
  }

  _draw() {
    this.destroy();
    this._views = [];
    this._prompts = [];
    this._resample.close();
    this._detail.clear();
    this._below.replaceChildren();
    this._said.textContent = "";
    const { main, beside } = this;
    this.element.hidden = !main;
    if (!main) return;
    const several = this._runs.length > 1;
    const name = (rollout) => title(rollout.facts, several ? this._runs[rollout.run].name : "");
    this._title.textContent = beside ? `${name(main)}  ↔  ${name(beside)}` : name(main);
    this._apart.hidden = !beside;
    this._texts.classList.toggle("xl-two", Boolean(beside));
    const shown = [main, beside].filter(Boolean);
    const columns = shown.map((rollout) => this._column(rollout, beside ? name(rollout) : ""));
    this._texts.replaceChildren(...columns.map(({ element }) => element));
    columns.forEach(({ view, rollout }) => view?.show(rollout.sequence));
    if (beside) {
      const shared = main.sequence.shared(beside.sequence);
      this._views.forEach((view) => (view.shared = shared));
      const least = Math.min(main.sequence.count, beside.sequence.count);
      this._said.textContent = shared === least && main.sequence.count === beside.sequence.count ? "Both are the same, token for token." : shared === 0 ? "They differ from the first token on." : `The first ${shared} tokens are the same (faint); they differ from token ${shared + 1} on (framed).`;
    }
    this._paint();
  }

  _column(rollout, name) {
    const { sequence, prompt, facts } = rollout;
    const element = h("div", { class: "xl-column" });
    if (name) element.append(h("p", { class: "xl-branch-head" }, h("b", {}, name)));
    element.append(factsOf(facts, sequence), notesOf(facts, (change) => this._annotate(rollout, change)), this._promptOf(prompt, facts.prompt));
    if (!sequence.spelled) element.append(h("p", { class: "xl-reason xl-warn-box" }, rollout.unspelled), plainText(facts.text));
    const view = this._view("Completion, token by token");
    view.branches = true;
    view.rollout = rollout;
    this._views.push(view);
    element.append(view.element);
    return { element, view, rollout };
  }

  /** The prompt, folded. */
  _promptOf(prompt, text) {
    const first = h("span", { class: "xl-first" });
    const said = prompt.spelled ? prompt.text : (text ?? "");
    first.append(...visible(said.slice(-200).replace(/\s+/g, " "), false).map((part) => part.text));
    const box = /** @type {HTMLDetailsElement} */ (h("details", { class: "xl-prompt" }, h("summary", {}, h("span", { class: "xl-unit" }, `prompt, ${prompt.count} tokens `), first)));
    box.addEventListener("toggle", () => {
      box.classList.toggle("xl-unfolded", box.open);
      if (!box.open || box.childElementCount > 1) return;
      const view = this._view("Prompt, token by token");
      this._prompts.push(view);
      if (!prompt.spelled) box.append(plainText(text));
      box.append(view.element);
      view.show(prompt);
      view.paint(new Array(prompt.units).fill("flat"));
    });
    return box;
  }

  /** @param {string} label */
  _view(label) {
    const view = new TokenView({
      label,
      picked: (from, unit) => {
        this._last = { view: from, unit };
        this._detail.show(from, unit);
      },
      hovered: (from, unit) => {
        if (unit !== null) this._detail.show(from, unit, { hover: true });
        else if (this._last) this._detail.show(this._last.view, this._last.unit, { hover: true });
        else this._detail.clear();
      },
    });
    view.write(this.raw);
    return view;
  }

  _paint() {
    const { measure } = this;
    const views = [...this._views, ...this._resample.views];
    const values = views.map((view) => valuesOf(measure, view.sequence));
    const some = values.filter(Boolean);
    const range = some.length ? rangeOf(measure, some) : null;
    let flags = 0;
    let missing = false;
    let read = false;
    views.forEach((view, i) => {
      view.paint(colours(view.sequence, measure, values[i], range));
      for (const flag of view.sequence.values.flags ?? []) if (flag > 0) flags |= flag;
      const { sequence } = view;
      missing ||= !values[i] || values[i].length < sequence.count || values[i].some((value, token) => Number.isNaN(value) && !sequence.isRead(token));
      read ||= sequence.drawn < sequence.count;
    });
    this._legend.replaceChildren(legendOf(measure, range, { flags, missing, read, texts: views.length }));
    const there = new Set(MEASURES.filter((one) => views.some((view) => valuesOf(one, view.sequence))).map((one) => one.key));
    for (const button of /** @type {Iterable<HTMLButtonElement>} */ (this._choices.children)) {
      const chosen = button.dataset.key === measure.key;
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      button.classList.toggle("xl-absent", !there.has(button.dataset.key));
      button.title = there.has(button.dataset.key) ? measureOf(button.dataset.key).long : `${measureOf(button.dataset.key).long}: not recorded here`;
    }
  }

  _colourBy(key) {
    this.measure = measureOf(key);
    this._paint();
  }

  _chooseByKey(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const at = MEASURES.findIndex((measure) => measure.key === this.measure.key);
    const to = (at + by + MEASURES.length) % MEASURES.length;
    this._colourBy(MEASURES[to].key);
    /** @type {HTMLElement} */ (this._choices.children[to]).focus();
  }

  _key(event, step, back) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (/** @type {HTMLElement} */ (event.target).closest("input, textarea, select")) return;
    const index = Number(event.key) - 1;
    const keys = { ",": () => step(-1), ".": () => step(1), Escape: back, r: () => this._last?.view.branches && this._branch(this._last.view, this._last.unit), w: () => this._rawBox.click() };
    const go = MEASURES[index] ? () => this._colourBy(MEASURES[index].key) : keys[event.key];
    if (!go) return;
    event.preventDefault();
    event.stopPropagation();
    go();
  }

  _branch(view, unit) {
    if (this._reason || !view.rollout || view.sequence.isRead(view.sequence.start(unit))) return;
    this._resample.begin(view.rollout, unit);
  }

  async _annotate(rollout, change) {
    const { content } = await this._ask({ kind: "annotate", run: rollout.run, rollout: rollout.facts.id, ...change });
    if (content.error) return content.error;
    rollout.facts.tags = content.tags;
    rollout.facts.note = content.note;
    this._noted();
    return "";
  }

  async _kin() {
    const { main } = this;
    if (this._below.querySelector(".xl-kin-box")) {
      this._below.replaceChildren();
      return;
    }
    const { content } = await this._ask({ kind: "same", run: main.run, rollout: main.facts.id });
    if (main !== this.main) return;
    if (content.error) this._below.replaceChildren(h("p", { class: "xl-bad" }, content.error));
    else this._below.replaceChildren(h("p", { class: "xl-branch-head" }, h("b", {}, "Same prompt"), h("span", { class: "xl-unit" }, ` ${content.columns.id.length} rollouts, reward by step`)), kinOf(content.columns, main.facts.id, this._open));
  }

  async _copy() {
    const { main } = this;
    const { content } = await this._ask({ kind: "datum", run: main.run, rollout: main.facts.id });
    if (main !== this.main) return;
    if (content.error) {
      this._said.textContent = content.error;
      return;
    }
    try {
      await navigator.clipboard.writeText(content.source);
      this._said.textContent = "Copied: Python source of the Datum.";
    } catch {
      const box = /** @type {HTMLTextAreaElement} */ (h("textarea", { class: "xl-source", readonly: true, rows: 8, "aria-label": "Python source of the Datum" }));
      box.value = content.source;
      this._below.replaceChildren(h("p", { class: "xl-unit" }, "This page may not use the clipboard: copy from here with Ctrl+C."), box);
      box.focus();
      box.select();
    }
  }
}

/** A long text in blocks that are laid out when they are seen. */
function plainText(text) {
  const box = h("div", { class: "xl-plain", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": "Text" });
  for (let at = 0; at < (text ?? "").length; ) {
    let end = Math.min(text.length, at + PIECE);
    const line = text.lastIndexOf("\n", end);
    if (end < text.length && line > at) end = line + 1;
    // Between two halves of a character there is no end.
    if (end < text.length && /[\ud800-\udbff]/.test(text[end - 1])) end += 1;
    const parts = visible(text.slice(at, end), false);
    box.append(h("div", { class: "xl-tokens" }, ...parts.map((part) => (part.mark ? h("i", { class: "xl-sign" }, part.text) : part.text))));
    at = end;
  }
  return box;
}
