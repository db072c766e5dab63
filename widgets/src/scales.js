// What tokens are coloured by, and how far the colours reach.

export const LEVELS = 8;
export const SIDES = 6;

/**
 * @typedef {import("./sequence.js").Sequence} Sequence
 * @typedef {{key: string, title: string, unit: string, long: string, kind: "low" | "high" | "signed", least: number,
 *   values: (sequence: Sequence) => ArrayLike<number> | null, place?: (value: number) => number, back?: (place: number) => number, whole?: boolean}} Measure
 */

function combined(left, right, work) {
  if (!left || !right) return null;
  const found = new Float64Array(left.length);
  for (let i = 0; i < left.length; i += 1) found[i] = work(left[i], right[i]);
  return found;
}

/** @type {Measure[]} */
export const MEASURES = [
  { key: "logprob", title: "logprob", unit: "nats", long: "log-probability, the sampler's", kind: "low", least: 0.5, values: ({ values }) => values.logprobs ?? null },
  {
    key: "advantage", title: "advantage", unit: "", long: "advantage, one number for the whole rollout", kind: "signed", least: 1, whole: true,
    values: ({ values, advantage, count }) => values.advantages ?? (advantage === null ? null : new Float64Array(count).map((_, i) => (values.weights?.[i] === 0 ? NaN : advantage))),
  },
  { key: "ratio", title: "ratio", unit: "", long: "probability ratio new/old at the last update, unclipped", kind: "signed", least: 0.01, values: ({ values }) => values.ratio ?? null, place: Math.log, back: Math.exp },
  { key: "gap", title: "trainer − sampler", unit: "nats", long: "the trainer's log-probability minus the sampler's", kind: "signed", least: 0.01, values: ({ values }) => combined(values.trainer_logprobs, values.logprobs, (a, b) => a - b) },
  {
    key: "kl", title: "KL to reference", unit: "nats", long: "KL to the reference, per token (k3)", kind: "high", least: 0.001,
    values: ({ values }) => combined(values.trainer_logprobs ?? values.logprobs, values.ref_logprobs, (a, b) => Math.expm1(b - a) + (a - b)),
  },
  { key: "entropy", title: "entropy", unit: "nats", long: "entropy of the distribution that the token was drawn from", kind: "high", least: 0.1, values: ({ values }) => values.entropies ?? null },
];

/** @param {string} key */
export function measureOf(key) {
  return MEASURES.find((measure) => measure.key === key) ?? MEASURES[0];
}

/**
 * A quantile of the numbers that are finite; NaN if none is.
 * @param {ArrayLike<number>} values
 * @param {number} share
 */
export function quantile(values, share) {
  const all = new Float64Array(values.length);
  let count = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (!Number.isFinite(values[i])) continue;
    all[count] = values[i];
    count += 1;
  }
  if (!count) return NaN;
  const some = all.subarray(0, count).sort();
  return some[Math.min(some.length - 1, Math.max(0, Math.round(share * (some.length - 1))))];
}

/**
 * How far the colours reach: from the 2nd or to the 98th percentile of the values, so that one
 * outlier does not flatten the rest.
 * @param {Measure} measure
 * @param {ArrayLike<number>[]} all  of every text that is shown with this scale
 * @returns {{from: number, to: number} | null} null where nothing has a value
 */
export function rangeOf(measure, all) {
  const place = measure.place ?? ((value) => value);
  const total = all.reduce((sum, values) => sum + values.length, 0);
  const places = new Float64Array(total);
  let at = 0;
  for (const values of all) {
    for (let i = 0; i < values.length; i += 1) {
      const value = place(values[i]);
      places[at] = measure.kind === "signed" ? Math.abs(value) : value;
      at += 1;
    }
  }
  if (measure.kind === "low") {
    const low = quantile(places, 0.02);
    return Number.isNaN(low) ? null : { from: Math.min(low, -measure.least), to: 0 };
  }
  const high = quantile(places, 0.98);
  if (Number.isNaN(high)) return null;
  const reach = Math.max(high, measure.least);
  return measure.kind === "signed" ? { from: -reach, to: reach } : { from: 0, to: reach };
}

/** How strong a colour is, with a sign where the measure has one; NaN without a value. */
function levelOf(measure, range, value) {
  if (value === undefined) return NaN;
  const place = measure.place ? measure.place(value) : value;
  if (measure.kind === "signed") return Math.max(-SIDES, Math.min(SIDES, Math.round((SIDES * place) / range.to)));
  const share = measure.kind === "low" ? (range.to - place) / (range.to - range.from) : (place - range.from) / (range.to - range.from);
  return Math.max(0, Math.min(LEVELS, Math.round(LEVELS * share)));
}

const SIGNED = Array.from({ length: 2 * SIDES + 1 }, (_, i) => `d${i - SIDES}`);
const PLAIN = Array.from({ length: LEVELS + 1 }, (_, i) => `s${i}`);

function nameOf(measure, level) {
  if (Number.isNaN(level)) return "void";
  return measure.kind === "signed" ? SIGNED[level + SIDES] : PLAIN[level];
}

/**
 * The class of a colour: `s0` … `s8` from nothing to strong, `d-6` … `d6`, `void` without a value.
 * @param {Measure} measure
 * @param {{from: number, to: number}} range
 * @param {number} value
 */
export function colourOf(measure, range, value) {
  return nameOf(measure, levelOf(measure, range, value));
}

/** @type {WeakMap<Sequence, Map<string, ArrayLike<number> | null>>} */
const WORKED_OUT = new WeakMap();

/**
 * The values of a measure, worked out once.
 * @param {Measure} measure
 * @param {Sequence} sequence
 */
export function valuesOf(measure, sequence) {
  const known = WORKED_OUT.get(sequence) ?? new Map();
  WORKED_OUT.set(sequence, known);
  if (!known.has(measure.key)) known.set(measure.key, measure.values(sequence));
  return known.get(measure.key);
}

/**
 * A class per unit: that of its token farthest from what is not coloured.
 * @param {Sequence} sequence
 * @param {Measure} measure
 * @param {ArrayLike<number> | null} values
 * @param {{from: number, to: number} | null} range
 * @returns {string[]}
 */
export function colours(sequence, measure, values, range) {
  const found = new Array(sequence.units).fill("void");
  if (!values || !range) return found;
  let token = 0;
  for (let unit = 0; unit < sequence.units; unit += 1) {
    const end = sequence.start(unit + 1);
    let best = levelOf(measure, range, values[token]);
    for (token += 1; token < end; token += 1) {
      const level = levelOf(measure, range, values[token]);
      if (Number.isNaN(best) || Math.abs(level) > Math.abs(best)) best = level;
    }
    found[unit] = nameOf(measure, best);
  }
  return found;
}

/** Marks of tokens, by bit. */
export const FLAGS = [
  { bit: 1, key: "clipped", title: "clipped", long: "the probability ratio was clipped" },
  { bit: 2, key: "masked", title: "masked", long: "left out of the loss" },
  { bit: 4, key: "cut", title: "weight cut", long: "its importance weight was truncated (TIS)" },
];
