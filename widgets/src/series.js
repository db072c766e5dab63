// From panels and runs to what the chart library draws.

import { edges, placed, smooth, stacked, union, widened } from "./data.js";
import { DASHES, translucent } from "./looks.js";

const MOST_DOTS = 60;

/**
 * One drawn line.
 * @typedef {{run: number, line: import("./data.js").Line, look: number, label: string, id: string}} Item
 */

/**
 * The lines of a panel: of one run, told apart by metric; of several runs, by run.
 * @param {import("./data.js").Panel} panel
 * @param {import("./data.js").Run[]} runs
 * @returns {Item[]}
 */
export function itemsOf(panel, runs) {
  const several = runs.length > 1;
  return runs.flatMap((run, r) =>
    panel.lines
      .map((line, l) => ({
        run: r,
        line,
        look: several ? r : l,
        label: several ? run.name : line.label,
        id: `${r}/${line.name}`,
      }))
      .filter((item) => run.names.includes(item.line.name)),
  );
}

/**
 * What to draw: aligned columns, and how each looks.
 * @param {Item[]} items
 * @param {{steps: ArrayLike<number>, exact: number, column(name: string): ArrayLike<number> | null}[]} tables one per run
 * @param {{smoothing: number, log: boolean, hidden: Set<string>, colours: string[]}} options
 */
export function plotOf(items, tables, options) {
  const shown = items.filter((item) => !options.hidden.has(item.id));
  const runs = [...new Set(shown.map((item) => item.run))];
  const xs = union(runs.length ? runs.map((r) => tables[r].steps) : [[]]);
  const data = [xs];
  /** @type {any[]} */
  const series = [{}];
  /** @type {any[]} */
  const bands = [];
  const put = (item, values, style, absent = undefined) => {
    data.push(placed(xs, tables[item.run].steps, values, options.log, absent));
    series.push({ show: true, points: { show: false }, ...style });
    return series.length - 1;
  };
  const colour = (item) => options.colours[item.look % options.colours.length];
  const parts = shown.filter((item) => item.line.shape === "stack");
  const sums = parts.length ? stacked(parts.map((p) => tables[p.run].column(p.line.name)), tables[parts[0].run].steps.length) : [];
  const drawn = parts.map((item, k) => {
    const values = options.smoothing ? smooth(sums[k], options.smoothing) : sums[k];
    return put(item, values, { stroke: colour(item), width: 1, fill: k === 0 ? translucent(colour(item), 0.45) : undefined });
  });
  drawn.forEach((at, k) => {
    if (k > 0) bands.push({ series: [at, drawn[k - 1]], fill: translucent(colour(parts[k]), 0.45) });
  });
  for (const item of shown.filter((i) => i.line.shape !== "stack")) {
    const table = tables[item.run];
    const values = table.column(item.line.name);
    if (!values) continue;
    const band = widened(edges(table, item.line), table);
    const soft = (v) => (options.smoothing ? smooth(v, options.smoothing) : v);
    if (band && !(options.log && item.line.spread)) {
      const style = { stroke: "transparent", width: 0 };
      const low = put(item, soft(band[0]), style);
      const high = put(item, soft(band[1]), style);
      bands.push({ series: [high, low], fill: translucent(colour(item), 0.15) });
    }
    if (item.line.shape === "points" && few(values)) {
      put(item, values, { stroke: colour(item), width: 1, dash: DASHES[item.look % DASHES.length], spanGaps: true, points: { show: true, size: 6, width: 1.5, fill: colour(item), stroke: colour(item) } });
      continue;
    }
    if (options.smoothing) put(item, values, { stroke: translucent(colour(item), 0.3), width: 1 });
    // One value alone is no line yet.
    const dot = Array.from(values).filter(Number.isFinite).length === 1 ? { points: { show: true, size: 6, fill: colour(item) } } : {};
    put(item, soft(values), { stroke: colour(item), width: 1.6, dash: DASHES[item.look % DASHES.length], ...dot });
  }
  return { data, series, bands };
}

/**
 * True if there are so few values that each may be a dot.
 * @param {ArrayLike<number>} values
 */
function few(values) {
  let count = 0;
  for (let i = 0; i < values.length; i += 1) if (!Number.isNaN(values[i])) count += 1;
  return count <= MOST_DOTS;
}

/**
 * Least and greatest step of all runs, never the same.
 * @param {{steps: ArrayLike<number>}[]} tables
 * @returns {[number, number]}
 */
export function extent(tables) {
  let low = Infinity;
  let high = -Infinity;
  for (const { steps } of tables) {
    if (!steps.length) continue;
    low = Math.min(low, steps[0]);
    high = Math.max(high, steps[steps.length - 1]);
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
