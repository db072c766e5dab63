import { describe, expect, it } from "vitest";
import { answererOf } from "../src/offline.js";
import { colourOf, measureOf, quantile, rangeOf, valuesOf } from "../src/scales.js";
import { Sequence, arraysOf } from "../src/sequence.js";
import { rowsOf } from "../src/tokenview.js";
import { MOST_CHARS, literal, oneLine, visible } from "../src/visible.js";
import { packed, spelled } from "./kernel.js";

const shown = (text, raw = false) => visible(text, raw).map((part) => part.text).join("");
const sequence = (units, more = []) => {
  const { heads, buffers } = packed([...spelled(units), ...more]);
  return new Sequence(arraysOf(heads, buffers));
};

describe("text", () => {
  it("holds nothing that acts, and says what was there", () => {
    expect(shown("a\u202eb\u0000c\u001b[0m\u200bd\ufeff\u2028")).toBe("a▯b␀c␛[0m▯d▯▯");
    expect(shown("a\u202e \n\t", true)).toBe("a⟨U+202E⟩␣⏎\n⇥\t");
    expect(shown("")).toBe("∅");
    expect(shown("<b>&amp;")).toBe("<b>&amp;");
  });

  it("leaves characters whole, and hides no text in them", () => {
    for (const whole of ["👨‍👩‍👧", "❤️", "🏴󠁧󠁢󠁷󠁬󠁳󠁿", "नि", "e\u0301", "مى\u200cخ"]) expect(shown(whole)).toBe(whole);
    expect(shown("a\u{e0041}\u{e0042}")).toBe("a▯▯");
    expect(shown("a\ufe00")).toBe("a▯");
    expect(shown(`z${"\u0301".repeat(9)}`)).toBe(`z${"\u0301".repeat(4)}▯▯▯▯▯`);
  });

  it("is cut where it is endless, saying so", () => {
    expect(shown("x".repeat(MOST_CHARS + 5))).toContain("⟨5 more characters⟩");
    expect(oneLine("a\n\t b\u202e")).toBe("a b▯");
  });

  it("is written as in Python", () => {
    expect(literal(new TextEncoder().encode(" it's\n\u202e\\"))).toBe("' it\\'s\\n\\u202e\\\\'");
    expect(literal(Uint8Array.from([0xf0, 0x9f, 0x41]))).toBe("b'\\xf0\\x9fA'");
    expect(literal(Uint8Array.from([0xef, 0xbb, 0xbf]))).toBe("'\\ufeff'");
  });
});

describe("a sequence", () => {
  it("keeps a byte order mark, and text that is no UTF-8", () => {
    const found = sequence([["\ufeff"], ["a"], [Uint8Array.from([0xe2]), Uint8Array.from([0x82])], ["b"]]);
    expect([0, 1, 2, 3].map((u) => found.textOf(u))).toEqual(["\ufeff", "a", "\ufffd", "b"]);
    expect([0, 1, 2, 3, 4].map((t) => found.unitOf(t))).toEqual([0, 1, 2, 2, 3]);
    expect(found.start(4)).toBe(5);
  });

  it("reads buffers that lie anywhere", () => {
    const bytes = new Uint8Array(9);
    new DataView(bytes.buffer).setInt32(1, 7, true);
    new DataView(bytes.buffer).setInt32(5, -1, true);
    expect([...arraysOf([["tokens", "i4"]], [new DataView(bytes.buffer, 1, 8)]).tokens]).toEqual([7, -1]);
  });

  it("is cut into rows, at the ends of lines if it can be", () => {
    const units = Array.from({ length: 500 }, (_, i) => [i === 130 ? "\n" : "a"]);
    expect(rowsOf(sequence(units))).toEqual([[0, 131], [131, 371], [371, 500]]);
  });
});

describe("scales", () => {
  it("reach as far as most values do, and say which have none", () => {
    const values = Float32Array.from({ length: 101 }, (_, i) => -i / 10);
    values[100] = -1e6;
    const measure = measureOf("logprob");
    const range = rangeOf(measure, [values]);
    expect(range.from).toBeCloseTo(-9.8, 5);
    expect(["s8", "s0", "s4", "void"]).toEqual([-1e6, 0, range.from / 2, NaN].map((v) => colourOf(measure, range, v)));
    expect(quantile([NaN, Infinity, 3], 0.5)).toBe(3);
    expect(rangeOf(measure, [[NaN]])).toBe(null);
  });

  it("have their middle where nothing is wrong", () => {
    const ratio = measureOf("ratio");
    const range = rangeOf(ratio, [[0.5, 1, 2]]);
    expect([0.5, 1, 2, 0, Infinity].map((v) => colourOf(ratio, range, v))).toEqual(["d-6", "d0", "d6", "d-6", "d6"]);
    // A gap of nothing but rounding is not blown up.
    const gap = measureOf("gap");
    expect(colourOf(gap, rangeOf(gap, [[1e-7, -1e-7]]), 1e-7)).toBe("d0");
  });

  it("know KL per token", () => {
    const one = sequence([["a"]], [["value:logprobs", "f4", [-1]], ["value:ref_logprobs", "f4", [-1.5]]]);
    expect(valuesOf(measureOf("kl"), one)[0]).toBeCloseTo(Math.exp(-0.5) + 0.5 - 1, 12);
  });
});

describe("a file", () => {
  const columns = { run: [0, 0, 0], id: [1, 2, 3], step: [1, 1, 2], group: [0, 0, 0], reward: [0.5, null, 1], failed: [false, true, false], length: [3, 3, 6], tags: [[], ["odd"], []], text: ["An", "b", "can"], prompt: ["p", "p", "q"], same: [0, 0, 1] };
  const answer = answererOf({ setup: { reason: "a copy" }, scalars: ["reward"], columns, rollouts: [] });
  const ids = (wish) => {
    answer({ kind: "query", where: [], search: "", order_by: "id", ...wish });
    return answer({ kind: "page", start: 0, count: 10 }).content.columns.id;
  };

  it("is asked as a store is", () => {
    expect(ids({})).toEqual([1, 2, 3]);
    expect(ids({ order_by: "reward", descending: true })).toEqual([3, 1, 2]);
    expect(ids({ order_by: "reward" })).toEqual([1, 3, 2]);
    expect(ids({ search: "AN" })).toEqual([1, 3]);
    expect(ids({ where: [["reward", "<", 2]] })).toEqual([1, 3]);
    expect(ids({ where: [["failed", "=", 1]] })).toEqual([2]);
    expect(ids({ where: [["tags", "has", "odd"]] })).toEqual([2]);
    expect(answer({ kind: "same", run: 0, rollout: 2 }).content.columns.id).toEqual([1, 2]);
    expect(answer({ kind: "annotate" }).content.error).toBe("a copy");
  });

  it("knows groups", () => {
    answer({ kind: "query", grouped: true, order_by: "step", descending: true });
    const { columns: groups, rollouts } = answer({ kind: "page", start: 0, count: 10 }).content;
    expect(groups.ids).toEqual([[3], [1, 2]]);
    expect(groups["reward:mean"]).toEqual([1, 0.5]);
    expect(groups.failed).toEqual([0, 1]);
    expect(rollouts.id).toEqual([3, 1, 2]);
  });
});

describe("an episode of several turns", () => {
  const one = sequence([["calc"], [": 2"], ["= 2"], ["\n"], ["A"], [": 2"]], [
    ["value:weights", "f4", [1, 1, 0, 0, 1, 1]],
    ["value:logprobs", "f4", [-1, -2, NaN, NaN, -3, -4]],
  ]);

  it("tells the model's tokens from the environment's", () => {
    expect([0, 1, 2, 3, 4, 5].map((token) => one.isRead(token))).toEqual([false, false, true, true, false, false]);
    expect([one.drawn, one.turns]).toEqual([4, 2]);
    const plain = sequence([["a"], ["b"]]);
    expect([plain.drawn, plain.turns, plain.isRead(0)]).toEqual([2, 1, false]);
  });

  it("has an advantage where the model wrote", () => {
    one.advantage = 0.5;
    expect([...valuesOf(measureOf("advantage"), one)]).toEqual([0.5, 0.5, NaN, NaN, 0.5, 0.5]);
    expect(valuesOf(measureOf("advantage"), sequence([["a"]]))).toBe(null);
  });
});
