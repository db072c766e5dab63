// The numbers of runs in the page: columns that grow, and what is drawn of them.

/**
 * @typedef {{name: string, label: string, shape: "line" | "points" | "stack", spread: string | null, low: string | null, high: string | null}} Line
 * @typedef {{key: string, title: string, unit: string, section: string, lines: Line[], share: boolean}} Panel
 * @typedef {[number, number, number | null, string, string]} Entry id, unix time, step, kind, text
 * @typedef {{state: string, step: number, total: number | null, message: string, seconds: number, left: number | null}} Status
 */

const LINES_KEPT = 500;
/** Of one kind, as in xorl_lab/widgets/feed.py. */
const MARKS_KEPT = 300;
const UNMARKED = new Set(["log", "warning", "start", "end", "resume"]);
/** What happens at nearly every step, and would leave no room in the log for what does not. */
export const ROUTINE = new Set(["sync"]);
/** Beyond so many rows the page asks for a thinned history. */
export const MOST_ROWS = 10_000;

/**
 * @param {DataView | ArrayBuffer | Uint8Array | string} data
 * @returns {ArrayBuffer} one that starts at 0, so that typed arrays may lie on it
 */
function bytes(data) {
  if (typeof data === "string") return Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer;
  if (data instanceof ArrayBuffer) return data;
  return data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
}

/** Steps and columns as they come over the wire: int32 steps, then float32 columns. */
export class Table {
  /**
   * @param {string[]} names
   * @param {number} rows
   * @param {DataView | ArrayBuffer | Uint8Array | string} data
   * @param {number} [exact] from this step on every step is there
   */
  constructor(names, rows, data, exact = -Infinity) {
    this.exact = exact;
    const buffer = bytes(data);
    this.names = names;
    this.length = rows;
    this.steps = new Int32Array(buffer, 0, rows);
    this.columns = names.map((_, k) => new Float32Array(buffer, 4 * rows * (k + 1), rows));
  }

  /** @param {string} name */
  column(name) {
    const k = this.names.indexOf(name);
    return k < 0 ? null : this.columns[k];
  }
}

/** One run as far as the page knows it. */
export class Run {
  /** @param {any} snapshot */
  constructor(snapshot) {
    const { id, name, kind, model, created, parent } = snapshot;
    Object.assign(this, { id, name, kind, model, created, parent });
    /** @type {string} */ this.name;
    /** @type {Status} */
    this.status = snapshot.status;
    /** @type {Entry[]} */
    this.lines = [...snapshot.lines];
    /** @type {Entry[]} */
    this.marks = [...snapshot.marks];
    /** Id of the newest event. */
    this.lastEvent = snapshot.event ?? 0;
    /** From this step on every step is there. */
    this.exact = snapshot.exact;
    this.names = [...snapshot.names];
    const table = new Table(this.names, snapshot.rows, snapshot.data);
    this.length = table.length;
    this._steps = table.steps;
    this._columns = table.columns;
  }

  get steps() {
    return this._steps.subarray(0, this.length);
  }

  get last() {
    return this.length ? this._steps[this.length - 1] : 0;
  }

  /** @param {string} name */
  column(name) {
    const k = this.names.indexOf(name);
    return k < 0 ? null : this._columns[k].subarray(0, this.length);
  }

  /**
   * Take in what is new.
   * @param {any} news
   * @param {DataView | undefined} data
   * @returns {boolean} false if steps between what is known and what came are missing
   */
  apply(news, data) {
    if (news.status) this.status = news.status;
    if (news.events) this._enter(news.events);
    if (news.names) this._name(news.names);
    if (!news.rows) return true;
    if (news.after > this.last) return false;
    const table = new Table(this.names, news.rows, data);
    let from = 0;
    while (from < table.length && table.steps[from] <= this.last) from += 1;
    const fresh = table.length - from;
    this._reserve(this.length + fresh);
    this._steps.set(table.steps.subarray(from), this.length);
    table.columns.forEach((column, k) => this._columns[k].set(column.subarray(from), this.length));
    this.length += fresh;
    return true;
  }

  /** @param {Entry[]} events */
  _enter(events) {
    const fresh = events.filter((e) => e[0] > this.lastEvent || e[0] < 0);
    this.lastEvent = fresh.reduce((newest, e) => Math.max(newest, e[0]), this.lastEvent);
    this.lines = [...this.lines, ...fresh.filter((e) => !ROUTINE.has(e[3]))].slice(-LINES_KEPT);
    const marks = fresh.filter((e) => !UNMARKED.has(e[3]) && e[2] !== null);
    if (marks.length) this.marks = newest([...this.marks, ...marks]);
  }

  /** @param {string[]} names begins with those that are known */
  _name(names) {
    for (const name of names.slice(this.names.length)) {
      this.names.push(name);
      this._columns.push(new Float32Array(this._steps.length).fill(NaN));
    }
  }

  /** @param {number} rows */
  _reserve(rows) {
    if (rows <= this._steps.length) return;
    const room = Math.max(256, 2 ** Math.ceil(Math.log2(rows)));
    const grown = (array, fresh) => (fresh.set(array.subarray(0, this.length)), fresh);
    this._steps = grown(this._steps, new Int32Array(room));
    this._columns = this._columns.map((c) => grown(c, new Float32Array(room).fill(NaN)));
  }
}

/**
 * The newest marks of each kind, so that what is frequent does not drive out what is rare.
 * @param {Entry[]} marks the oldest first
 */
function newest(marks) {
  const counts = new Map();
  const kept = marks.reverse().filter(([, , , kind]) => {
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return counts.get(kind) <= MARKS_KEPT;
  });
  return kept.reverse();
}

/**
 * The newest value that is one, with its place.
 * @param {ArrayLike<number> | null} values
 */
export function latest(values) {
  for (let i = (values?.length ?? 0) - 1; i >= 0; i -= 1) if (!Number.isNaN(values[i])) return values[i];
  return NaN;
}

/**
 * The place of the step nearest to `step`.
 * @param {ArrayLike<number>} steps ascending, not empty
 * @param {number} step
 */
export function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

/**
 * Exponential moving average without the bias towards its start; gaps stay gaps.
 * @param {ArrayLike<number>} values
 * @param {number} weight of the past, 0 to below 1
 */
export function smooth(values, weight) {
  const result = new Float64Array(values.length);
  let mean = 0;
  let total = 0;
  for (let i = 0; i < values.length; i += 1) {
    const value = values[i];
    if (!Number.isFinite(value)) {
      result[i] = value;
      continue;
    }
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    result[i] = mean / total;
  }
  return result;
}

/**
 * The edges of a line's band.  One standard deviation does not leave the range of the values.
 * @param {{column(name: string): ArrayLike<number> | null}} table
 * @param {Line} line
 * @returns {[Float64Array, Float64Array] | null} lower, upper
 */
export function edges(table, line) {
  const low = line.low ? table.column(line.low) : null;
  const high = line.high ? table.column(line.high) : null;
  const spread = line.spread ? table.column(line.spread) : null;
  const mean = table.column(line.name);
  if (!mean || !(spread || (low && high))) return null;
  const bottom = new Float64Array(mean.length);
  const top = new Float64Array(mean.length);
  for (let i = 0; i < mean.length; i += 1) {
    bottom[i] = spread ? Math.max(mean[i] - spread[i], low?.[i] ?? -Infinity) : low[i];
    top[i] = spread ? Math.min(mean[i] + spread[i], high?.[i] ?? Infinity) : high[i];
  }
  return [bottom, top];
}

/**
 * A band whose edges are the outer ones of each pair of rows that stands for many steps.
 * @param {[Float64Array, Float64Array] | null} band
 * @param {{steps: ArrayLike<number>, exact: number}} table
 */
export function widened(band, { steps, exact }) {
  if (!band) return band;
  const [low, high] = band;
  for (let i = 0; i + 1 < steps.length && steps[i + 1] < exact; i += 2) {
    low[i] = low[i + 1] = Math.min(low[i], low[i + 1]);
    high[i] = high[i + 1] = Math.max(high[i], high[i + 1]);
  }
  return band;
}

/**
 * All steps of several runs, ascending, each once.
 * @param {ArrayLike<number>[]} lists
 * @returns {number[]}
 */
export function union(lists) {
  if (lists.length === 1) return Array.from(lists[0]);
  const all = new Set();
  for (const list of lists) for (let i = 0; i < list.length; i += 1) all.add(list[i]);
  return [...all].sort((a, b) => a - b);
}

/**
 * Values at the places of `xs`: undefined where the run has no such step, null where it has no
 * value that can be drawn.
 * @param {ArrayLike<number>} xs
 * @param {ArrayLike<number>} steps
 * @param {ArrayLike<number>} values
 * @param {boolean} positive true to leave out what a logarithm does not know
 * @param {number | null | undefined} absent
 */
export function placed(xs, steps, values, positive, absent = undefined) {
  const result = new Array(xs.length);
  let at = 0;
  for (let i = 0; i < xs.length; i += 1) {
    while (at < steps.length && steps[at] < xs[i]) at += 1;
    if (at >= steps.length || steps[at] !== xs[i]) {
      result[i] = absent;
      continue;
    }
    const value = values[at];
    result[i] = Number.isFinite(value) && !(positive && value <= 0) ? value : null;
  }
  return result;
}

/**
 * Sums of the parts up to each one; a part that a step lacks counts as nothing.
 * @param {(ArrayLike<number> | null)[]} parts
 * @param {number} length
 */
export function stacked(parts, length) {
  const sums = [];
  let below = new Float64Array(length);
  for (const part of parts) {
    const sum = new Float64Array(length);
    for (let i = 0; i < length; i += 1) {
      const value = part?.[i];
      sum[i] = below[i] + (Number.isFinite(value) ? value : 0);
    }
    sums.push(sum);
    below = sum;
  }
  return sums;
}
