// The inspector as a whole: filters, table, and the rollout that is open.

import { GROUPS, ROLLOUTS, TEXTS, columnOf } from "./columns.js";
import { Filters } from "./filters.js";
import { h, number } from "./looks.js";
import { Reading, rolloutOf } from "./reading.js";
import { Rows } from "./rows.js";
import { Table } from "./table.js";
import { oneLine } from "./visible.js";

const POLL = 2000;

export class Desk {
  /**
   * @param {HTMLElement} root
   * @param {{runs: {name: string, kind: string, model: string}[], reason: string}} setup
   * @param {import("./channel.js").Ask} ask
   */
  constructor(root, setup, ask) {
    this.root = root;
    this.setup = setup;
    this._ask = ask;
    this.grouped = false;
    this._orders = { false: { order_by: "id", descending: true }, true: { order_by: "step", descending: true } };
    const chosen = setup.runs.length > 1 ? ["run", ...ROLLOUTS] : ROLLOUTS;
    this._chosen = { false: [...chosen], true: setup.runs.length > 1 ? ["run", ...GROUPS] : [...GROUPS] };
    this._scalars = { false: [], true: [] };
    this._rollouts = 0;
    this._version = 0;
    this._round = 0;
    this.rows = new Rows(ask, () => {
      this._span();
      this.table.draw();
    });
    this.rows.lost = () => this.query({ keep: true });
    this.table = new Table({
      rows: this.rows,
      runs: setup.runs,
      open: (row) => this.open(row),
      beside: (row) => this.openBeside(row),
      sort: (name) => this._sort(name),
    });
    this.reading = new Reading({
      ask,
      runs: setup.runs,
      reason: setup.reason,
      open: (place) => this.open(place),
      step: (by) => this.table.step(by),
      closed: () => this._close(),
      noted: () => this.query({ keep: true }),
      back: () => this.table.element.focus(),
    });
    this.filters = new Filters(() => this.query());
    this._build();
    this.query();
    this._timer = setInterval(() => this._poll(), POLL);
    this._seen = true;
    this._watch = new IntersectionObserver((entries) => (this._seen = entries.at(-1).isIntersecting));
    this._watch.observe(root);
  }

  get wish() {
    return { ...this.filters.wish, ...this._orders[String(this.grouped)], grouped: this.grouped };
  }

  /** @param {{keep?: boolean}} [how]  `keep`: the view stays where it is */
  async query({ keep = false } = {}) {
    this._round += 1;
    const round = this._round;
    if (!keep) {
      this.table.waiting = true;
      this.table.element.setAttribute("aria-busy", "true");
    }
    const { content } = await this._ask({ kind: "query", ...this.wish });
    if (round !== this._round || this._gone) return;
    this.table.waiting = false;
    this.table.element.removeAttribute("aria-busy");
    if (content.error) {
      this._say(content.error, true);
      return;
    }
    this._version = content.version;
    this._rollouts = content.rollouts;
    this._news.hidden = true;
    this._scalars = { false: content.columns, true: content.group_columns };
    this.filters.offer(content.columns);
    this.table.grouped = this.grouped;
    this.rows.reset(content.key, content.count);
    this._arrange();
    this.table.reset({ keep });
    const what = this.grouped ? (content.count === 1 ? "group" : "groups") : content.count === 1 ? "rollout" : "rollouts";
    this._say(`${content.count.toLocaleString("en")} ${what}`);
  }

  async open(place) {
    const round = (this._opening = (this._opening ?? 0) + 1);
    const start = performance.now();
    const { content, buffers } = await this._ask({ kind: "rollout", run: place.run, rollout: place.id });
    if (round !== this._opening || this._gone) return;
    if (content.error) {
      this._say(content.error, true);
      return;
    }
    const came = performance.now();
    this.reading.show(rolloutOf(content, buffers));
    // For whoever measures: what the answer took, and what drawing it took.
    this.root.dataset.opened = `${content.facts.id} ${(came - start).toFixed(1)} ${(performance.now() - came).toFixed(1)}`;
    this.table.opened = { run: place.run, id: place.id };
    this.table.draw();
    this.reading.element.scrollIntoView?.({ block: "nearest" });
  }

  async openBeside(place) {
    if (!this.reading.main) {
      await this.open(place);
      return;
    }
    const { content, buffers } = await this._ask({ kind: "rollout", run: place.run, rollout: place.id });
    if (content.error) this._say(content.error, true);
    else if (!this._gone) this.reading.showBeside(rolloutOf(content, buffers));
  }

  destroy() {
    this._gone = true;
    clearInterval(this._timer);
    this._watch.disconnect();
    this.table.destroy();
    this.reading.destroy();
  }

  _build() {
    const [one] = this.setup.runs;
    const several = this.setup.runs.length > 1;
    this._count = h("span", { class: "xl-unit", role: "status", "aria-live": "polite" }, "…");
    const kinds = [[false, "Rollouts"], [true, "Groups"]];
    this._kinds = h("div", { class: "xl-segments", role: "radiogroup", "aria-label": "Rows are" });
    for (const [grouped, text] of kinds) {
      const button = h("button", { type: "button", class: "xl-segment", role: "radio", "aria-checked": String(grouped === false), tabindex: grouped ? -1 : 0 }, text);
      button.addEventListener("click", () => this._group(Boolean(grouped)));
      this._kinds.append(button);
    }
    this._kinds.addEventListener("keydown", (event) => {
      if (!/^Arrow/.test(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      this._group(!this.grouped);
      /** @type {HTMLElement} */ (this._kinds.children[Number(this.grouped)]).focus();
    });
    this._news = h("button", { type: "button", class: "xl-button xl-news", hidden: true });
    this._news.addEventListener("click", () => this.query());
    this._columnList = h("div", { class: "xl-choices", role: "group", "aria-label": "Columns" });
    const columns = /** @type {HTMLDetailsElement} */ (h("details", { class: "xl-columns" }, h("summary", { class: "xl-button" }, "Columns"), this._columnList));
    columns.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      columns.open = false;
      columns.querySelector("summary").focus();
    });
    const names = several ? `${this.setup.runs.length} runs` : one.name;
    const about = several ? this.setup.runs.map((run) => run.name).join(", ") : `${one.kind} · ${one.model}`;
    const head = h("header", { class: "xl-desk-head" }, h("strong", {}, oneLine(names)), this._count, this._news, h("span", { class: "xl-fill" }), h("span", { class: "xl-unit xl-about-runs", title: oneLine(about) }, oneLine(about)), this._kinds, columns);
    this._help = h("p", { class: "xl-unit xl-help" }, "Enter opens a row, C or Shift+click puts it beside the open one. In the tokens: arrows move, N and P go to marked ones, 1–6 colour, R resamples, Escape goes back to the table.");
    this.root.replaceChildren(head, this.filters.element, this.table.element, this._help, this.reading.element);
  }

  _say(text, bad = false) {
    this._count.className = bad ? "xl-bad" : "xl-unit";
    this._count.textContent = text;
  }

  _arrange() {
    const key = String(this.grouped);
    const scalars = this._scalars[key];
    this.table.arrange(this._chosen[key], scalars, this._orders[key]);
    const every = this.grouped ? [...this._scalars.true, "rewards", "prompt"] : [...scalars, ...TEXTS];
    if (this.setup.runs.length > 1) every.unshift("run");
    this._columnList.replaceChildren(
      ...every.map((name) => {
        const box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox" }));
        box.checked = this._chosen[key].includes(name);
        box.addEventListener("change", () => {
          const chosen = new Set(this._chosen[key]);
          if (box.checked) chosen.add(name);
          else chosen.delete(name);
          this._chosen[key] = every.filter((one) => chosen.has(one));
          this.table.arrange(this._chosen[key], scalars, this._orders[key]);
        });
        return h("label", { class: "xl-check" }, box, columnOf(name).title);
      }),
    );
  }

  _sort(name) {
    const key = String(this.grouped);
    const now = this._orders[key];
    const fallback = this.grouped ? "step" : "id";
    if (now.order_by !== name) this._orders[key] = { order_by: name, descending: true };
    else if (now.descending) this._orders[key] = { order_by: name, descending: false };
    else this._orders[key] = { order_by: fallback, descending: true };
    this.query();
  }

  _group(grouped) {
    if (grouped === this.grouped) return;
    this.grouped = grouped;
    [...this._kinds.children].forEach((button, i) => {
      button.setAttribute("aria-checked", String(Boolean(i) === grouped));
      /** @type {HTMLElement} */ (button).tabIndex = Boolean(i) === grouped ? 0 : -1;
    });
    this.query();
  }

  /** Between which rewards the dots of groups are drawn: those of the rows that are there. */
  _span() {
    if (!this.grouped) return;
    let [low, high] = this._low ?? [Infinity, -Infinity];
    for (let i = 0; i < Math.min(this.rows.count, 400); i += 1) {
      const row = this.rows.at(i);
      if (typeof row?.["reward:min"] !== "number" || typeof row["reward:max"] !== "number") continue;
      low = Math.min(low, row["reward:min"]);
      high = Math.max(high, row["reward:max"]);
    }
    this._low = [low, high];
    if (Number.isFinite(low)) this.table.spread(low, high);
  }

  _close() {
    this.reading.main = null;
    this.reading.showBeside(null);
    this.table.opened = null;
    this.table.draw();
    this.table.element.focus();
  }

  async _poll() {
    if (this._polling || !this._seen || document.visibilityState !== "visible" || !this.root.isConnected) return;
    this._polling = true;
    try {
      const { content } = await this._ask({ kind: "changed", version: this._version, ...this.wish });
      if (content.error || this._gone || content.count === undefined) return;
      this._version = content.version;
      const more = content.count - this._rollouts;
      if (more === 0) return;
      if (this.table.top && !this.table.busy) this.query({ keep: true });
      else {
        this._news.hidden = false;
        this._news.textContent = more > 0 ? `${number(more)} new` : "changed";
      }
    } finally {
      this._polling = false;
    }
  }
}
