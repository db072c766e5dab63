// What a kernel answers an inspector, for a run of a few rollouts.

const encoder = new TextEncoder();

/** @param {[string, "i4" | "f4" | "u1", ArrayLike<number>][]} arrays */
export function packed(arrays) {
  const types = { i4: Int32Array, f4: Float32Array, u1: Uint8Array };
  const buffers = arrays.map(([, type, values]) => new DataView(types[type].from(values).buffer));
  return { heads: arrays.map(([name, type]) => [name, type]), buffers };
}

/**
 * Arrays of a text: `units` holds the pieces of each unit.
 * @param {(string | Uint8Array)[][]} units
 */
export function spelled(units, prefix = "") {
  const pieces = units.flat().map((piece) => (typeof piece === "string" ? encoder.encode(piece) : piece));
  const bytes = pieces.flatMap((piece) => [...piece]);
  const starts = [];
  const chars = [];
  let at = 0;
  let token = 0;
  for (const unit of units) {
    starts.push(token);
    token += unit.length;
    const own = pieces.slice(token - unit.length, token).flatMap((piece) => [...piece]);
    chars.push(new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(own)).length);
    at += own.length;
  }
  return [
    [`${prefix}tokens`, "i4", pieces.map((_, i) => 100 + i)],
    [`${prefix}bytes`, "u1", bytes],
    [`${prefix}sizes`, "i4", pieces.map((piece) => piece.length)],
    [`${prefix}units`, "i4", starts],
    [`${prefix}chars`, "i4", chars],
  ];
}

const emoji = encoder.encode("😀");
export const UNITS = [["The"], [" sum"], [" is"], [emoji.slice(0, 2), emoji.slice(2)], ["\n"], ["\u202e"], ["<b>"], ["<|end|>"]];

export function rollout(id, more = {}) {
  const count = UNITS.flat().length;
  const logprobs = Array.from({ length: count }, (_, i) => -0.5 * i);
  const { heads, buffers } = packed([
    ...spelled([["What"], ["?"]], "prompt_"),
    ...spelled(UNITS),
    ["value:logprobs", "f4", logprobs],
    ["value:trainer_logprobs", "f4", logprobs.map((x, i) => x + (i % 2 ? 0.1 : -0.1))],
    ["value:ref_logprobs", "f4", logprobs.map((x, i) => (i === 2 ? NaN : x - 0.2))],
    ["value:flags", "f4", [0, 1, 0, 0, 0, 6, 0, 0, 0]],
    ["top_ids", "i4", Array.from({ length: count }, (_, i) => [100 + i, 7]).flat()],
    ["top_logprobs", "f4", Array.from({ length: count }, (_, i) => [logprobs[i], -3]).flat()],
    ["vocabulary_tokens", "i4", [7]],
    ["vocabulary_sizes", "i4", [2]],
    ["vocabulary_bytes", "u1", [...encoder.encode("no")]],
  ]);
  const facts = { id, step: 1, group: 0, sample: id, prompt: "What?", row: { answer: "<i>7</i>" }, text: "", stop_reason: "length", version: 3, reward: 0.5, reward_parts: { "<u>": 0.25 }, advantage: -0.5, error: null, tags: ["a"], note: "", ...more };
  return { content: { run: 0, facts, arrays: heads, special: [108], alternatives: 2, unspelled: "" }, buffers };
}

const rowOf = (i) => ({ run: 0, id: i + 1, step: 1, group: 0, sample: i % 4, reward: i === 2 ? null : i / 10, advantage: 0, length: 9, stop_reason: "stop", failed: i === 2, tags: [], text: `text ${i} <script>`, prompt: "What?", error: i === 2 ? "boom" : null });

/** A kernel with `count` rollouts; `asked` holds what it was asked. */
export function kernel(count = 1000) {
  const asked = [];
  const state = { count, version: 1, asked, answers: {} };
  const columns = (start, size) => {
    const rows = Array.from({ length: Math.max(0, Math.min(size, state.count - start)) }, (_, i) => rowOf(start + i));
    return Object.fromEntries(Object.keys(rowOf(0)).map((name) => [name, rows.map((row) => row[name])]));
  };
  state.ask = async (content) => {
    asked.push(content);
    const own = state.answers[content.kind];
    if (own) return own(content);
    const answers = {
      query: () => ({ key: asked.length, count: content.grouped ? state.count / 4 : state.count, rollouts: state.count, version: state.version, columns: ["id", "step", "reward", "length"], group_columns: ["step", "n", "reward:mean"] }),
      page: () => (content.start >= 0 && state.grouped ? state.grouped(content) : { start: content.start, columns: columns(content.start, content.count) }),
      changed: () => ({ version: state.version, count: state.count }),
      annotate: () => ({ tags: content.tags, note: content.note }),
      datum: () => ({ source: "datum = 1" }),
      weights: () => ({ weights: ["base", "a/step-1"] }),
      same: () => ({ columns: columns(0, 5) }),
    };
    if (content.kind === "rollout") return rollout(content.rollout);
    return { content: answers[content.kind](), buffers: [] };
  };
  return state;
}
