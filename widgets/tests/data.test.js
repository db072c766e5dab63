import { describe, expect, it } from "vitest";
import { edges, latest, nearest, placed, Run, smooth, stacked, union, widened } from "../src/data.js";
import { snapshotOf, wire } from "./support.js";

const run = () => new Run(snapshotOf([1, 2], { reward: [0.5, 0.25] }));

describe("a run", () => {
  it("has what the snapshot has", () => {
    const { steps, last } = run();
    expect([...steps]).toEqual([1, 2]);
    expect(last).toBe(2);
    expect([...run().column("reward")]).toEqual([0.5, 0.25]);
    expect(run().column("loss")).toBeNull();
  });

  it("reads text as well as bytes, as an exported page has it", () => {
    const data = wire([1, 2], { reward: [0.5, 0.25] });
    const text = btoa(String.fromCharCode(...new Uint8Array(data.buffer)));
    const read = new Run({ ...snapshotOf([1, 2], { reward: [0.5, 0.25] }), data: text });
    expect([...read.column("reward")]).toEqual([0.5, 0.25]);
  });

  it("reads a buffer that begins anywhere in its message", () => {
    const inner = new Uint8Array(wire([7], { reward: [0.5] }).buffer);
    const outer = new Uint8Array(inner.length + 3);
    outer.set(inner, 3);
    const read = new Run({ ...snapshotOf([7], { reward: [0.5] }), data: new DataView(outer.buffer, 3) });
    expect(read.last).toBe(7);
  });

  it("grows, far beyond its first room", () => {
    const grown = run();
    for (let step = 3; step <= 1000; step += 1) {
      expect(grown.apply({ after: step - 1, rows: 1 }, wire([step], { reward: [step] }))).toBe(true);
    }
    expect(grown.length).toBe(1000);
    expect(grown.column("reward")[999]).toBe(1000);
    expect(grown.column("reward")[0]).toBe(0.5);
  });

  it("gives new metrics no value where they were not known", () => {
    const grown = run();
    grown.apply({ after: 2, rows: 1, names: ["reward", "loss"] }, wire([3], { reward: [1], loss: [2] }));
    expect([...grown.column("loss")]).toEqual([NaN, NaN, 2]);
  });

  it("ignores steps that it has", () => {
    const grown = run();
    expect(grown.apply({ after: 1, rows: 2 }, wire([2, 3], { reward: [9, 0.75] }))).toBe(true);
    expect([...grown.column("reward")]).toEqual([0.5, 0.25, 0.75]);
  });

  it("notices that steps are missing", () => {
    const grown = run();
    expect(grown.apply({ after: 4, rows: 1 }, wire([5], { reward: [1] }))).toBe(false);
    expect(grown.length).toBe(2);
  });

  it("takes each event once, and marks only what is one", () => {
    const grown = run();
    const events = [
      [1, 0, 1, "log", "a line"],
      [2, 0, 2, "checkpoint", "saved"],
      [3, 0, null, "error", "no step"],
    ];
    grown.apply({ events });
    grown.apply({ events });
    expect(grown.lines.length).toBe(3);
    expect(grown.marks.map((m) => m[0])).toEqual([2]);
  });

  it("knows what it has of what is no line of the log", () => {
    const grown = run();
    grown.apply({ events: [[1, 0, 1, "knob", "turned"]] });
    const events = Array.from({ length: 900 }, (_, i) => [i + 2, 0, i, "sync", `weights of step ${i}`]);
    grown.apply({ events });
    grown.apply({ events });
    grown.apply({ events: [[-1, 5, null, "error", "the run cannot be read"]] });
    expect(grown.lastEvent).toBe(901);
    expect(grown.lines.map((line) => line[3])).toEqual(["knob", "error"]);
    expect(grown.marks.map((mark) => mark[0])).toEqual([1, ...events.slice(-300).map((e) => e[0])]);
  });

  it("begins behind the events of its snapshot", () => {
    const later = new Run(snapshotOf([1], { reward: [1] }, { event: 7 }));
    later.apply({ events: [[7, 0, 1, "log", "known"], [8, 0, 1, "log", "new"]] });
    expect(later.lines.map((line) => line[4])).toEqual(["new"]);
  });

  it("keeps infinity", () => {
    const grown = run();
    grown.apply({ after: 2, rows: 2 }, wire([3, 4], { reward: [Infinity, NaN] }));
    expect(grown.column("reward")[2]).toBe(Infinity);
    expect(latest(grown.column("reward"))).toBe(Infinity);
  });
});

describe("what is drawn", () => {
  it("smooths without a bias towards the start, and keeps gaps", () => {
    expect([...smooth([2, 2, 2], 0.9)].every((v) => Math.abs(v - 2) < 1e-12)).toBe(true);
    const gap = smooth([1, NaN, 3], 0.5);
    expect(gap[1]).toBeNaN();
    expect(gap[2]).toBeCloseTo((0.25 * 1 + 0.5 * 3) / 0.75, 12);
  });

  it("finds the nearest step", () => {
    expect([0, 1.4, 1.6, 9].map((step) => nearest([1, 2, 5], step))).toEqual([0, 0, 1, 2]);
  });

  it("lays several runs over each other", () => {
    const xs = union([[1, 2, 3], [2, 4]]);
    expect(xs).toEqual([1, 2, 3, 4]);
    expect(placed(xs, [2, 4], [5, Infinity], false)).toEqual([undefined, 5, undefined, null]);
  });

  it("leaves out what a logarithm does not know", () => {
    expect(placed([1, 2, 3], [1, 2, 3], [-1, 0, 2], true)).toEqual([null, null, 2]);
  });

  it("draws one standard deviation within the range of the values", () => {
    const columns = { reward: [0.9], std: [0.2], min: [0], max: [1] };
    const table = { column: (name) => columns[name] ?? null };
    const [low, high] = edges(table, { name: "reward", spread: "std", low: "min", high: "max" });
    expect(low[0]).toBeCloseTo(0.7);
    expect(high[0]).toBe(1);
    expect(edges(table, { name: "reward", spread: null, low: null, high: null })).toBeNull();
  });

  it("takes the outer edges of rows that stand for many steps", () => {
    const band = [new Float64Array([3, 1, 2]), new Float64Array([4, 9, 5])];
    const [low, high] = widened(band, { steps: [1, 5, 10], exact: 10 });
    expect([...low]).toEqual([1, 1, 2]);
    expect([...high]).toEqual([9, 9, 5]);
  });

  it("stacks parts, and counts a missing one as nothing", () => {
    expect(stacked([[1, 2], [NaN, 3], null], 2).map((s) => [...s])).toEqual([[1, 2], [1, 5], [1, 5]]);
  });
});
