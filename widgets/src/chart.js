// One panel: its head with the values, and its canvas.

import uPlot from "uplot";
import { latest, nearest } from "./data.js";
import { h, kindOf, number, swatch, tick } from "./looks.js";
import { itemsOf, plotOf } from "./series.js";

const HEIGHT = 132;
const HEIGHT_WIDE = 280;
const MARK_GAP = 4;

/**
 * Make the canvas of a chart; in a module variable so that tests without canvas can replace it.
 * @param {any} options @param {any} data @param {HTMLElement} target
 */
export const plots = { create: (options, data, target) => new uPlot(options, data, target) };

export class Chart {
  /**
   * @param {import("./data.js").Panel} panel
   * @param {import("./board.js").Board} board the view that it belongs to
   */
  constructor(panel, board) {
    this.panel = panel;
    this.board = board;
    this.log = false;
    this.wide = false;
    this.visible = false;
    /** @type {Set<string>} */
    this.hidden = new Set();
    /** @type {any} */
    this.plot = null;
    this._shape = "";
    this._legend = h("ul", { class: "xl-legend" });
    this._values = new Map();
    this._log = this._toggle("log", "Logarithmic scale; values up to 0 are left out", () => (this.log = !this.log));
    this._wide = this._toggle("⤢", "Full width", () => {
      this.wide = !this.wide;
      this.element.classList.toggle("xl-wide", this.wide);
    });
    const unit = panel.unit ? h("span", { class: "xl-unit" }, panel.unit) : "";
    const head = h("div", { class: "xl-head" }, h("h4", {}, panel.title), unit, h("span", { class: "xl-fill" }), this._log, this._wide);
    this._canvas = h("div", { class: "xl-canvas", role: "img" });
    this.element = h("section", { class: "xl-panel", "data-panel": panel.key, "aria-label": panel.title }, head, this._legend, this._canvas);
    /** @type {any} */ (this.element).xlChart = this;
  }

  /** Draw anew, if anybody can see it. */
  draw() {
    const items = itemsOf(this.panel, this.board.runs);
    this._drawLegend(items);
    this.readout();
    if (!this.visible) return;
    const width = Math.floor(this._canvas.clientWidth);
    if (width < 40) return;
    const height = this.wide ? HEIGHT_WIDE : HEIGHT;
    const { data, series, bands } = plotOf(items, this.board.tables(), { smoothing: this.board.smoothing, log: this.log, hidden: this.hidden, colours: this.board.theme.lines });
    const shape = JSON.stringify([series, bands, this.log, this.board.theme.dark]);
    if (this.plot && shape === this._shape) {
      if (this.plot.width !== width || this.plot.height !== height) this.plot.setSize({ width, height });
      this.plot.setData(data, true);
    } else {
      this.plot?.destroy();
      this._shape = shape;
      this.plot = plots.create(this._options(width, height, series, bands), data, this._canvas);
    }
    this.point();
  }

  /** Put the crosshair where the board has it. */
  point() {
    if (!this.plot) return;
    const { cursor } = this.board;
    const left = cursor === null ? -10 : this.plot.valToPos(cursor, "x");
    this.plot.setCursor({ left, top: cursor === null ? -10 : 1 }, false);
  }

  /** Write the values at the crosshair, or the newest ones. */
  readout() {
    const said = [];
    for (const [item, output] of this._values) {
      const text = this._text(item);
      if (output.textContent !== text) output.textContent = text;
      said.push(`${item.label} ${text}`);
    }
    const where = this.board.cursor === null ? "newest" : `step ${this.board.cursor}`;
    this._canvas.setAttribute("aria-label", `${this.panel.title}, ${where}: ${said.join(", ")}`);
  }

  /** The value of a line in words, for those who listen. */
  spoken() {
    return [...this._values.keys()].map((item) => `${this.panel.title} ${item.label} ${this._text(item)}`);
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
    this.element.remove();
  }

  /** @param {import("./series.js").Item} item */
  _text(item) {
    const { cursor } = this.board;
    const table = this.board.tables()[item.run];
    const values = table.column(item.line.name);
    if (!values || !table.steps.length) return "–";
    if (cursor === null) return number(latest(values));
    const at = nearest(table.steps, cursor);
    if (table.steps[at] !== cursor && this.board.runs.length > 1) return "–";
    const about = table.steps[at] < table.exact ? "≈" : "";
    return about + number(values[at]);
  }

  /** @param {import("./series.js").Item[]} items */
  _drawLegend(items) {
    const ids = items.map((item) => item.id + item.label).join("\n");
    if (ids === this._legendIds) return;
    this._legendIds = ids;
    this._values.clear();
    const single = items.length === 1 && this.board.runs.length === 1 && !this.hidden.has(items[0].id);
    this._legend.replaceChildren(
      ...items.map((item) => {
        const value = h("output", {});
        this._values.set(item, value);
        if (single) return h("li", {}, swatch(item.look, item.line.shape), h("span", { class: "xl-label" }, item.label), value);
        const button = h("button", { type: "button", "aria-pressed": String(!this.hidden.has(item.id)), title: "Show or hide this line" }, swatch(item.look, item.line.shape), h("span", { class: "xl-label" }, item.label), value);
        button.addEventListener("click", () => {
          if (this.hidden.has(item.id)) this.hidden.delete(item.id);
          else this.hidden.add(item.id);
          button.setAttribute("aria-pressed", String(!this.hidden.has(item.id)));
          this.draw();
        });
        return h("li", {}, button);
      }),
    );
  }

  /** @param {string} text @param {string} title @param {() => void} act */
  _toggle(text, title, act) {
    const button = h("button", { type: "button", class: "xl-tool", title, "aria-label": `${title}: ${this.panel.title}`, "aria-pressed": "false" }, text);
    button.addEventListener("click", () => {
      act();
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      this.draw();
    });
    return button;
  }

  _options(width, height, series, bands) {
    const { board } = this;
    const theme = board.theme;
    const axis = { stroke: theme.text, font: theme.font, ticks: { show: false }, gap: 3 };
    const grid = { stroke: theme.grid, width: 1 };
    return {
      width,
      height,
      padding: [6, 14, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false, dist: 6 },
        points: { size: 6, width: 1 },
        // The plot's own answer to a double click would show part of the data anew.
        bind: { dblclick: () => () => board.zoomTo(null) },
      },
      scales: {
        x: { time: false, range: () => board.range() },
        y: { distr: this.log ? 3 : 1, range: (plot, low, high) => this._range(low, high) },
      },
      axes: [
        { ...axis, size: 20, space: 50, grid, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7], values: (_, splits) => splits.map((v) => (v % 1 === 0 ? tick(v) : "")) },
        { ...axis, size: 44, space: 24, grid, values: (_, splits) => splits.map((v) => (v === null ? "" : tick(v, splits.length > 1 ? splits[1] - splits[0] : 0))) },
      ],
      series,
      bands,
      hooks: {
        draw: [(plot) => this._drawMarks(plot)],
        // New data moves the plot's own crosshair too: only the mouse may move that of the board.
        init: [(plot) => this._follow(plot)],
        setCursor: [
          (plot) => {
            const { idx, left } = plot.cursor;
            if (this._mouse && idx !== null && left >= 0) board.pointAt(plot.data[0][idx], this);
          },
        ],
        setSelect: [
          (plot) => {
            const { left, width: wide } = plot.select;
            if (wide < 6) return;
            const to = [plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")];
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            board.zoomTo(to);
          },
        ],
      },
    };
  }

  /** @param {any} plot */
  _follow(plot) {
    this._mouse = false;
    plot.over.addEventListener("mouseenter", () => (this._mouse = true));
    plot.over.addEventListener("mousemove", () => (this._mouse = true));
    plot.over.addEventListener("mouseleave", () => {
      this._mouse = false;
      this.board.pointAt(null, this);
    });
  }

  /** @param {number | null} low @param {number | null} high @returns {[number, number]} */
  _range(low, high) {
    if (low === null || high === null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low, high];
    if (this.panel.share) return [0, Math.min(1.02, Math.max(high * 1.1, 0.02))];
    const stack = this.panel.lines[0].shape === "stack";
    if (stack) return [0, high * 1.08 || 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
    // A scale that nearly reaches 0 may as well begin there.
    const bottom = low >= 0 && low - room < (high - low) * 0.25 ? Math.min(0, low) : low - room;
    return [bottom, high + room];
  }

  /** @param {any} plot */
  _drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    const theme = this.board.theme;
    let before = -Infinity;
    ctx.save();
    ctx.font = `${8 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const { step, kind } of this.board.marks()) {
      const x = Math.round(plot.valToPos(step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width || x - before < MARK_GAP * ratio) continue;
      before = x;
      const colour = kind === "error" ? theme.bad : kind === "knob" ? theme.accent : theme.text;
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.globalAlpha = kind === "error" || kind === "knob" ? 0.8 : 0.35;
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 0.9;
      ctx.fillText(kindOf(kind).glyph, x, bbox.top + 3 * ratio);
    }
    ctx.restore();
  }
}
