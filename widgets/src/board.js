// One view of the dashboard: its charts, and what they share.

import { Chart } from "./chart.js";
import { Table } from "./data.js";
import { Log } from "./log.js";
import { duration, h, kindOf, readTheme, stateOf, swatch, watchTheme } from "./looks.js";
import { extent } from "./series.js";
import { Timeline } from "./timeline.js";

/** So many marks of one kind are drawn into a chart; where there are more, none of them is. */
const MARKS_SHOWN = 30;
const DETAIL_AFTER = 150;

export class Board {
  /**
   * @param {HTMLElement} root
   * @param {{runs: import("./data.js").Run[], panels: import("./data.js").Panel[]}} store
   * @param {(content: Record<string, unknown>) => Promise<{content: any, buffers: DataView[]}>} ask
   */
  constructor(root, store, ask) {
    this.root = root;
    this.store = store;
    this._ask = ask;
    /** @type {number | null} */
    this.cursor = null;
    /** @type {[number, number] | null} */
    this.zoom = null;
    this.smoothing = 0;
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
    /** @type {{table: Table, low: number, high: number}[]} */
    this._detail = [];
    this._due = false;
    this._said = "";
    this._build();
    this.theme = readTheme(root);
    this._watchers = [
      watchTheme(() => {
        this.theme = readTheme(root);
        this.draw();
      }),
    ];
    const sizes = new ResizeObserver(() => this.draw());
    sizes.observe(this._grid);
    this._seen = new IntersectionObserver((entries) => this._see(entries), { rootMargin: "200px" });
    this._watchers.push(() => sizes.disconnect(), () => this._seen.disconnect());
    this.draw();
  }

  get runs() {
    return this.store.runs;
  }

  /** One table per run: the part that was asked for in full where it covers what is shown. */
  tables() {
    return this.runs.map((run, r) => {
      const part = this.zoom ? this._detail[r] : undefined;
      if (!part || !this.zoom || part.low > this.zoom[0] || part.high < this.zoom[1]) return run;
      return part.table;
    });
  }

  /** The steps that are in view. */
  range() {
    return this.zoom ?? extent(this.runs);
  }

  /** Events of all runs that are drawn into the charts, by step. */
  marks() {
    const [low, high] = this.range();
    const several = this.runs.length > 1;
    const all = this.runs.flatMap((run) => {
      const first = run.length ? run.steps[0] : 0; // what came before it is drawn at it
      return run.marks.map(([, , step, kind, text]) => ({ step: Math.max(step ?? 0, first), kind, text: several ? `${run.name}: ${text}` : text }));
    });
    const inside = all.filter((mark) => mark.step >= low && mark.step <= high);
    const counts = new Map();
    for (const { kind } of inside) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return inside.filter(({ kind }) => counts.get(kind) <= MARKS_SHOWN).sort((a, b) => a.step - b.step);
  }

  /**
   * Move the crosshair of all charts.
   * @param {number | null} step
   * @param {Chart | null} [source] the chart that has it there already
   */
  pointAt(step, source = null) {
    if (step === this.cursor) return;
    this.cursor = step;
    for (const chart of this.charts.values()) {
      if (chart.visible && chart !== source) chart.point();
      chart.readout();
    }
    this._readout();
  }

  /**
   * Show only some steps, or all.
   * @param {[number, number] | null} range
   */
  zoomTo(range) {
    if (range) {
      const [first, last] = extent(this.runs);
      let [low, high] = [Math.max(first, Math.min(...range)), Math.min(last, Math.max(...range))];
      if (high - low < 1) [low, high] = [Math.floor(low), Math.floor(low) + 1];
      range = [low, high];
    }
    this.zoom = range;
    /** @type {HTMLButtonElement} */ (this._reset).disabled = !range;
    clearTimeout(this._asking);
    this._detail = [];
    if (range) this._asking = setTimeout(() => this._look(range), DETAIL_AFTER);
    this.draw();
  }

  /** Draw at the next frame what there is to draw. */
  draw() {
    if (this._due) return;
    this._due = true;
    requestAnimationFrame(() => {
      this._due = false;
      if (!this._gone) this._draw();
    });
  }

  destroy() {
    this._gone = true;
    clearTimeout(this._asking);
    for (const stop of this._watchers) stop();
    for (const chart of this.charts.values()) chart.destroy();
    this.charts.clear();
    this.root.replaceChildren();
  }

  _build() {
    this._title = h("div", { class: "xl-runs" });
    this._timeline = new Timeline((step) => this.pointAt(step));
    const slider = /** @type {HTMLInputElement} */ (h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "Smoothing" }));
    slider.addEventListener("input", () => {
      this.smoothing = Number(slider.value);
      this.draw();
    });
    this._reset = h("button", { type: "button", class: "xl-button", disabled: true, title: "Show all steps (Esc, or double click a chart)" }, "Reset zoom");
    this._reset.addEventListener("click", () => this.zoomTo(null));
    this._where = h("span", { class: "xl-where" });
    const tools = h("div", { class: "xl-tools" }, h("label", { class: "xl-check" }, "Smoothing", slider), this._reset, this._where);
    this._grid = h("div", { class: "xl-grid", role: "group", tabindex: 0, "aria-label": "Charts. Left and right arrow move the crosshair, with Shift by ten steps; plus and minus zoom; Escape shows all." });
    this._empty = h("p", { class: "xl-none" }, "No step has been recorded yet: the charts begin with the first one.");
    this._more = h("div", { class: "xl-grid" });
    this._moreTitle = h("summary", {}, "More");
    this._moreBox = h("details", { class: "xl-more" }, this._moreTitle, this._more);
    this._moreBox.addEventListener("toggle", () => this.draw());
    this._log = new Log();
    this._live = h("div", { class: "xl-hidden", role: "status", "aria-live": "polite" });
    const charts = h("div", { class: "xl-charts" }, tools, this._empty, this._grid, this._moreBox);
    charts.addEventListener("keydown", (event) => this._key(event));
    this.root.replaceChildren(h("header", { class: "xl-top" }, this._title, this._timeline.element), charts, this._log.element, this._live);
  }

  _draw() {
    this._arrange();
    this._drawRuns();
    this._timeline.draw(this.runs[0]);
    this._log.draw(this.runs);
    const none = this.runs.every((run) => run.length === 0);
    this._empty.hidden = !none;
    for (const chart of this.charts.values()) chart.draw();
    this._readout();
  }

  /** One chart per panel, in order; those that are there stay. */
  _arrange() {
    const keys = this.store.panels.map((panel) => panel.key + panel.lines.length).join();
    if (keys === this._keys) return;
    this._keys = keys;
    const wanted = new Set(this.store.panels.map((panel) => panel.key));
    for (const [key, chart] of this.charts) if (!wanted.has(key)) (chart.destroy(), this.charts.delete(key));
    for (const panel of this.store.panels) {
      let chart = this.charts.get(panel.key);
      if (!chart) {
        chart = new Chart(panel, this);
        this.charts.set(panel.key, chart);
        this._seen.observe(chart.element);
      }
      chart.panel = panel;
      (panel.section === "more" ? this._more : this._grid).append(chart.element);
    }
    const more = this.store.panels.filter((panel) => panel.section === "more").length;
    this._moreBox.hidden = more === 0;
    this._moreTitle.textContent = `More metrics (${more})`;
  }

  _see(entries) {
    for (const entry of entries) {
      const chart = /** @type {any} */ (entry.target).xlChart;
      chart.visible = entry.isIntersecting;
      if (chart.visible) chart.draw();
    }
  }

  _drawRuns() {
    const several = this.runs.length > 1;
    this._title.replaceChildren(
      ...this.runs.map((run, r) => {
        const { state, step, total, message, seconds, left } = run.status;
        const look = stateOf(state);
        const steps = total ? `step ${step} of ${total}` : `step ${step}`;
        const times = [duration(seconds), left === null ? "" : `about ${duration(left)} left`].filter(Boolean).join(" · ");
        const parent = run.parent && this.runs.find((other) => other.id === run.parent.run);
        const origin = run.parent ? ` · from ${parent ? `${parent.name}, ` : ""}${run.parent.checkpoint}` : "";
        return h(
          "div",
          { class: "xl-run", "data-state": state },
          several ? swatch(r, "line") : "",
          h("strong", {}, run.name),
          h("span", { class: `xl-state xl-is-${state}` }, h("span", { "aria-hidden": "true" }, look.glyph), ` ${look.text}`),
          h("span", { class: "xl-steps" }, steps),
          h("span", { class: "xl-times" }, times),
          message ? h("span", { class: "xl-message" }, message) : "",
          h("span", { class: "xl-about" }, `${run.kind} · ${run.model}${origin}`),
        );
      }),
    );
    const said = this.runs.map((run) => `${run.name} is ${stateOf(run.status.state).text}`).join(", ");
    if (said !== this._said) {
      this._said = said;
      this._live.textContent = said;
    }
  }

  /** Where the crosshair is and what happened there. */
  _readout() {
    if (this.cursor === null) {
      this._where.textContent = this.zoom ? `steps ${Math.ceil(this.zoom[0])}–${Math.floor(this.zoom[1])}` : "";
      return;
    }
    const [low, high] = this.range();
    const near = (high - low) * 0.006;
    const events = this.marks().filter((mark) => Math.abs(mark.step - this.cursor) <= near);
    const texts = events.slice(0, 3).map((mark) => `${kindOf(mark.kind).glyph} ${mark.text || kindOf(mark.kind).word}`);
    this._where.textContent = [`step ${this.cursor}`, ...texts].join(" · ");
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/** @type {HTMLElement} */ (event.target).closest("input, .xl-lines")) return;
    const go = this._shortcuts()[event.key];
    if (!go) return;
    event.preventDefault();
    event.stopPropagation();
    go(event.shiftKey ? 10 : 1);
    this._speak();
  }

  _shortcuts() {
    const zoom = (factor) => {
      const [low, high] = this.range();
      const middle = this.cursor ?? (low + high) / 2;
      const half = ((high - low) * factor) / 2;
      const [first, last] = extent(this.runs);
      this.zoomTo(half * 2 >= last - first ? null : [middle - half, middle + half]);
    };
    return {
      ArrowLeft: (by) => this._move(-by),
      ArrowRight: (by) => this._move(by),
      Home: () => this.pointAt(this._steps()[0] ?? null),
      End: () => this.pointAt(this._steps().at(-1) ?? null),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      Escape: () => (this.zoom ? this.zoomTo(null) : this.pointAt(null)),
    };
  }

  /** The steps in view of all runs. */
  _steps() {
    const [low, high] = this.range();
    const all = new Set();
    for (const { steps } of this.tables()) for (const step of steps) if (step >= low && step <= high) all.add(step);
    return [...all].sort((a, b) => a - b);
  }

  /** @param {number} by */
  _move(by) {
    const steps = this._steps();
    if (!steps.length) return;
    const from = this.cursor === null ? (by > 0 ? -1 : steps.length) : steps.findIndex((s) => s >= this.cursor);
    this.pointAt(steps[Math.min(steps.length - 1, Math.max(0, from + by))]);
  }

  _speak() {
    const said = [...this.charts.values()].filter((c) => c.panel.section !== "more").slice(0, 3).flatMap((c) => c.spoken().slice(0, 1));
    this._live.textContent = [this._where.textContent, ...said].join(", ");
  }

  /** Ask for the steps in view in full, where the page only has some. */
  async _look(range) {
    const [low, high] = range;
    await Promise.all(
      this.runs.map(async (run, r) => {
        if (run.exact <= low || run.length === 0) return;
        const { content, buffers } = await this._ask({ kind: "part", run: r, low, high });
        if (this.zoom !== range || content.error || this._gone) return;
        this._detail[r] = { table: new Table(content.names, content.rows, buffers[0], content.exact), low, high };
        this.draw();
      }),
    );
  }
}
