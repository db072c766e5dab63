// The row of filters: what a person types becomes conditions, as the store understands them.

import { h } from "./looks.js";

const PAUSE = 300;
const OPERATORS = [[">", ">"], [">=", "≥"], ["<", "<"], ["<=", "≤"], ["=", "="], ["!=", "≠"]];
const STOPS = ["stop", "length", "abort"];

export class Filters {
  /** @param {() => void} changed */
  constructor(changed) {
    this._changed = changed;
    this._fields = {
      search: field("search", { placeholder: "Search in text and prompt", "aria-label": "Search in text and prompt", class: "xl-search" }),
      stepFrom: small("first step"),
      stepTo: small("last step"),
      rewardFrom: small("least reward"),
      rewardTo: small("greatest reward"),
      stop: select("ended by", [["", "any end"], ...STOPS.map((stop) => [stop, stop])]),
      failed: select("reward function", [["", "all rewards"], ["1", "reward failed"], ["0", "reward worked"]]),
      signal: select("signal", [["", "any signal"], ["!=", "has signal"], ["=", "no signal"]]),
      tags: field("text", { placeholder: "tags", "aria-label": "tags, with a space between them", class: "xl-tags-field" }),
      name: select("scalar", [["", "+ scalar"]]),
      operator: select("comparison", OPERATORS),
      value: small("value"),
    };
    const f = this._fields;
    this._scalar = h("span", { class: "xl-range" }, f.name, f.operator, f.value);
    this._clear = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "xl-button", disabled: true }, "Clear"));
    this._clear.addEventListener("click", () => {
      for (const element of Object.values(f)) element.value = element === f.operator ? ">" : "";
      this._tell();
    });
    this.element = h("div", { class: "xl-filters", role: "search", "aria-label": "Filter rollouts" },
      f.search, range("step", f.stepFrom, f.stepTo), range("reward", f.rewardFrom, f.rewardTo), f.stop, f.failed, f.signal, f.tags, this._scalar, this._clear);
    this.element.addEventListener("input", (event) => {
      clearTimeout(this._timer);
      const typed = /** @type {HTMLElement} */ (event.target).tagName === "INPUT";
      this._timer = setTimeout(() => this._tell(), typed ? PAUSE : 0);
    });
    this._show();
  }

  /** @param {string[]} names  of the scalars that there are */
  offer(names) {
    const { name } = this._fields;
    if (names.join() === this._names) return;
    this._names = names.join();
    const chosen = name.value;
    name.replaceChildren(h("option", { value: "" }, "+ scalar"), ...names.filter((n) => n !== "stop_reason").map((n) => h("option", { value: n }, n)));
    name.value = chosen;
  }

  /** @returns {{where: [string, string, any][], search: string}} */
  get wish() {
    const f = this._fields;
    /** @type {[string, string, any][]} */
    const where = [];
    const compare = (name, operator, element) => {
      const value = read(element.value);
      element.setAttribute("aria-invalid", String(element.value.trim() !== "" && Number.isNaN(value)));
      if (!Number.isNaN(value)) where.push([name, operator, value]);
    };
    compare("step", ">=", f.stepFrom);
    compare("step", "<=", f.stepTo);
    compare("reward", ">=", f.rewardFrom);
    compare("reward", "<=", f.rewardTo);
    if (f.stop.value) where.push(["stop_reason", "=", f.stop.value]);
    if (f.failed.value) where.push(["failed", "=", Number(f.failed.value)]);
    if (f.signal.value) where.push(["advantage", f.signal.value, 0]);
    for (const tag of f.tags.value.split(/[\s,]+/).filter(Boolean)) where.push(["tags", "has", tag]);
    if (f.name.value) compare(f.name.value, f.operator.value, f.value);
    return { where, search: f.search.value.trim() };
  }

  _tell() {
    clearTimeout(this._timer);
    this._show();
    const now = JSON.stringify(this.wish);
    if (now === this._told) return;
    this._told = now;
    this._changed();
  }

  _show() {
    const { where, search } = this.wish;
    this._told ??= JSON.stringify({ where, search });
    this._clear.disabled = Object.values(this._fields).every((e) => e === this._fields.operator || e.value === "");
    this._scalar.classList.toggle("xl-unused", this._fields.name.value === "");
  }
}

function field(type, more) {
  return /** @type {HTMLInputElement} */ (h("input", { type, autocomplete: "off", spellcheck: "false", ...more }));
}

function small(label) {
  return field("text", { inputmode: "decimal", "aria-label": label, title: label, class: "xl-small" });
}

function select(label, options) {
  return /** @type {HTMLSelectElement} */ (h("select", { "aria-label": label, title: label }, ...options.map(([value, text]) => h("option", { value }, text))));
}

function range(title, from, to) {
  return h("span", { class: "xl-range" }, h("span", { class: "xl-unit" }, title), from, h("span", { class: "xl-unit" }, "–"), to);
}

/** @param {string} text */
function read(text) {
  return text.trim() === "" ? NaN : Number(text.trim().replace(",", ".").replace("−", "-"));
}
