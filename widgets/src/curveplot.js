// One plot of the explorer of losses: a curve over the ratio, drawn as SVG with the page's colours.

import { nearest } from "./data.js";
import { h, number, tick } from "./looks.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const ROOM = { left: 46, right: 10, top: 20, bottom: 22 };
const TICKS = [0.001, 0.01, 0.03125, 0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 100, 1000];
let count = 0;

/** An element of SVG. */
function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/**
 * Places for about four ticks.
 * @param {number} low @param {number} high
 */
export function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/**
 * The range of a plot: all that is drawn, and 0, with some room.
 * @param {(number | null)[]} values
 */
export function extent(values) {
  let [low, high] = [0, 0];
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const room = (high - low) * 0.07 || 1;
  return [low - room, high + room];
}

/**
 * An SVG path through points; a gap where there is no number.
 * @param {number[]} xs @param {(number | null)[]} ys
 */
export function path(xs, ys) {
  let pen = "M";
  const parts = [];
  ys.forEach((y, i) => {
    if (y === null || !Number.isFinite(y)) {
      pen = "M";
      return;
    }
    parts.push(`${pen}${xs[i].toFixed(1)} ${y.toFixed(1)}`);
    pen = "L";
  });
  return parts.join("");
}

/**
 * The widest part of a region that lies under no other kind, where its name is written.
 * @param {import("./explorer.js").Region} region @param {import("./explorer.js").Region[]} others
 */
export function uncovered(region, others) {
  if (region.kind === "masked") return [region.low, region.high];
  const masks = others.filter(({ kind }) => kind === "masked").sort((a, b) => a.low - b.low);
  let best = [region.low, region.low];
  let from = region.low;
  for (const { low, high } of [...masks, { low: region.high, high: region.high }]) {
    const to = Math.min(Math.max(low, from), region.high);
    if (to / from > best[1] / best[0]) best = [from, to];
    from = Math.min(region.high, Math.max(from, high));
  }
  return best;
}

export class CurvePlot {
  /**
   * @param {{title: string, column: "values" | "gradients", mark: "value" | "gradient", look: number}} what
   * @param {(ratio: number) => void} pointed  the mouse points at a ratio
   */
  constructor(what, pointed) {
    this.what = what;
    this._id = `xl-hatch-${(count += 1)}`;
    this._svg = s("svg", { class: "xl-curve", role: "img", height: HEIGHT, preserveAspectRatio: "none" });
    this.element = h("figure", { class: "xl-plot", "data-plot": what.column });
    this.element.append(this._svg);
    const point = (event) => {
      if (!(event.buttons & 1) || !this._toRatio) return;
      pointed(this._toRatio(event.clientX - this._svg.getBoundingClientRect().left));
    };
    this._svg.addEventListener("pointerdown", (event) => {
      this._svg.setPointerCapture?.(event.pointerId);
      point(event);
    });
    this._svg.addEventListener("pointermove", point);
  }

  /**
   * @param {import("./explorer.js").Curve} curve
   * @param {import("./explorer.js").Curve | null} kept  drawn behind it, to compare
   */
  draw(curve, kept) {
    const width = Math.max(220, Math.floor(this.element.clientWidth));
    const { column, title, mark } = this.what;
    const [first, last] = [Math.log(curve.ratios[0]), Math.log(curve.ratios.at(-1))];
    const inner = width - ROOM.left - ROOM.right;
    const x = (ratio) => ROOM.left + ((Math.log(ratio) - first) / (last - first)) * inner;
    this._toRatio = (at) => Math.exp(first + Math.min(1, Math.max(0, (at - ROOM.left) / inner)) * (last - first));
    const inside = (ratio) => ratio >= curve.ratios[0] * 0.999 && ratio <= curve.ratios.at(-1) * 1.001;
    const shown = kept ? kept.ratios.map((ratio, i) => (inside(ratio) ? kept[column][i] : null)) : [];
    const [low, high] = extent([...curve[column], ...shown]);
    const floor = HEIGHT - ROOM.bottom;
    const y = (value) => floor - ((value - low) / (high - low)) * (floor - ROOM.top);
    const line = (values, ratios) => path(ratios.map(x), values.map((value) => (value === null ? null : y(value))));
    const at = curve.mark.ratio;
    const value = curve.mark[mark];
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this._svg.setAttribute("width", String(width));
    const where = curve.regions.map((r) => `${r.kind} from ${number(r.low)} to ${number(r.high)}`);
    this._svg.setAttribute("aria-label", `${title} of ${curve.loss} over the ratio; at ratio ${number(at)}: ${number(value)}. ${where.join("; ")}`);
    this._svg.replaceChildren(
      this._patterns(),
      ...curve.regions.flatMap((region) => this._region(region, x, floor)),
      ...curve.regions.flatMap((region) => this._word(region, curve, { x, y, floor })),
      ...this._axes({ x, y, low, high, first, last, width, floor }),
      s("text", { x: 2, y: 12, class: "xl-title" }, title),
      ...(kept ? [s("path", { d: line(shown, kept.ratios), class: "xl-kept" })] : []),
      s("path", { d: line(curve[column], curve.ratios), class: `xl-line xl-of-${column}` }),
      s("line", { x1: x(at), x2: x(at), y1: ROOM.top, y2: floor, class: "xl-marked" }),
      ...(value === null || !Number.isFinite(value) ? [] : [s("circle", { cx: x(at), cy: y(value), r: 5, class: "xl-dot" })]),
    );
  }

  /** Strokes as the second cue: one way where a token is clipped, crossed where it is masked. */
  _patterns() {
    const pattern = (kind, d) => s("pattern", { id: `${this._id}-${kind}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, s("path", { d, class: `xl-stroke xl-of-${kind}` }));
    return s("defs", {}, pattern("clipped", "M-2 2L2 -2M0 8L8 0M6 10L10 6"), pattern("masked", "M0 0L8 8M0 8L8 0"));
  }

  _region(region, x, floor) {
    const [from, to] = [x(region.low), x(region.high)];
    const wide = Math.max(1, to - from);
    const box = { x: from.toFixed(1), y: ROOM.top, width: wide.toFixed(1), height: floor - ROOM.top };
    return [s("rect", { ...box, class: `xl-region xl-of-${region.kind}`, "data-low": region.low, "data-high": region.high }), s("rect", { ...box, fill: `url(#${this._id}-${region.kind})` })];
  }

  /** The name of a region, on the side that the curve leaves free. */
  _word(region, curve, { x, y, floor }) {
    const [low, high] = uncovered(region, curve.regions);
    if (x(high) - x(low) < 44) return [];
    const value = curve[this.what.column][nearest(curve.ratios, Math.sqrt(low * high))];
    const above = value === null || y(value) > (ROOM.top + floor) / 2;
    return [s("text", { x: (x(low) + x(high)) / 2, y: above ? ROOM.top + 12 : floor - 5, class: "xl-word" }, region.kind)];
  }

  _axes({ x, y, low, high, first, last, width, floor }) {
    const parts = [];
    for (const ratio of TICKS) {
      const log = Math.log(ratio);
      if (log < first - 1e-6 || log > last + 1e-6) continue;
      parts.push(s("line", { x1: x(ratio), x2: x(ratio), y1: ROOM.top, y2: floor, class: ratio === 1 ? "xl-gridline xl-one" : "xl-gridline" }));
      parts.push(s("text", { x: x(ratio), y: HEIGHT - 8, class: "xl-at-x" }, tick(ratio)));
    }
    const places = ticks(low, high);
    for (const value of places) {
      parts.push(s("line", { x1: ROOM.left, x2: width - ROOM.right, y1: y(value), y2: y(value), class: Math.abs(value) < 1e-12 ? "xl-gridline xl-one" : "xl-gridline" }));
      parts.push(s("text", { x: ROOM.left - 5, y: y(value) + 3, class: "xl-at-y" }, tick(Math.abs(value) < 1e-12 ? 0 : value, places[1] - places[0])));
    }
    return parts;
  }
}
