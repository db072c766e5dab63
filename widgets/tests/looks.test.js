import { afterEach, describe, expect, it } from "vitest";
import { duration, h, isDark, number, stateOf, tick } from "../src/looks.js";
import { joined } from "../src/log.js";
import { grouped } from "../src/timeline.js";

describe("numbers", () => {
  it.each([
    [0, "0"],
    [0.123456, "0.123"],
    [-0.5, "−0.500"],
    [3, "3"],
    [1234, "1234"],
    [123456, "123k"],
    [2.26e9, "2.26G"],
    [1e-4, "1·10⁻⁴"],
    [NaN, "–"],
    [undefined, "–"],
    [Infinity, "∞"],
    [-Infinity, "−∞"],
  ])("%s is %s", (value, text) => expect(number(value)).toBe(text));

  it.each([[0.1, "0.1"], [20000, "20k"], [1500, "1500"], [2.4e9, "2.4G"], [0.30000000000000004, "0.3"], [100, "100"], [-0.05, "−0.05"]])(
    "%s at an axis is %s",
    (value, text) => expect(tick(value)).toBe(text),
  );

  it("tells neighbours at an axis apart", () => {
    expect([0.99999, 1, 1.00001].map((v) => tick(v, 1e-5))).toEqual(["0.99999", "1.00000", "1.00001"]);
    expect([0.5, 1].map((v) => tick(v, 0.5))).toEqual(["0.5", "1"]);
  });

  it.each([[5, "5 s"], [65, "1 min 05 s"], [3600, "1 h 00 min"], [null, ""], [Infinity, ""]])("%s seconds are %s", (s, text) =>
    expect(duration(s)).toBe(text),
  );
});

describe("the page", () => {
  afterEach(() => delete document.body.dataset.jpThemeLight);

  it("is dark when JupyterLab says so", () => {
    document.body.dataset.jpThemeLight = "false";
    expect(isDark()).toBe(true);
    document.body.dataset.jpThemeLight = "true";
    expect(isDark()).toBe(false);
  });

  it("sets text as text", () => {
    const evil = "<img src=x onerror=alert(1)>";
    const element = h("p", { title: evil }, evil);
    expect(element.children.length).toBe(0);
    expect(element.textContent).toBe(evil);
  });

  it("knows what to say of an unknown state", () => expect(stateOf("odd").text).toBe("odd"));
});

describe("many events", () => {
  it("become one mark with the text of all, the gravest first in its looks", () => {
    const marks = [
      [1, 0, 50, "checkpoint", "saved"],
      [2, 0, 51, "error", "broken"],
      [3, 0, 90, "knob", "changed"],
    ];
    const groups = grouped(marks, 100);
    expect(groups.map((g) => [g.step, g.kind, g.texts.length])).toEqual([
      [50, "error", 2],
      [90, "knob", 1],
    ]);
  });

  it("are told the gravest first, and no more than five", () => {
    const marks = ["checkpoint", "sync", "pause", "checkpoint", "checkpoint", "knob", "sync"].map((kind, i) => [i, 0, 50, kind, `${kind} ${i}`]);
    const [group] = grouped(marks, 100);
    expect(group.kind).toBe("knob");
    expect(group.texts).toEqual(["step 50: knob 5", "step 50: pause 2", "step 50: checkpoint 0", "step 50: checkpoint 3", "step 50: checkpoint 4", "…"]);
  });

  it("of every step leave the line to what is rare", () => {
    const syncs = (count) => Array.from({ length: count }, (_, i) => [i, 0, 2 * i, "sync", "sent"]);
    const pause = [999, 0, 50, "pause", ""];
    expect(grouped([...syncs(3), pause], 100).map((g) => g.kind)).toEqual(["sync", "sync", "sync", "pause"]);
    expect(grouped([...syncs(31), pause], 100).map((g) => [g.kind, g.texts])).toEqual([["pause", ["step 50: pause"]]]);
  });

  it("never fill the line", () => {
    const marks = Array.from({ length: 1000 }, (_, i) => [i, 0, i, "checkpoint", "saved"]);
    expect(grouped(marks, 1000).length).toBeLessThanOrEqual(25);
  });

  it("that say the same are one line with a count", () => {
    const entry = (id, text) => ({ run: "", key: `0/${id}`, entry: [id, id, id, "warning", text] });
    expect(joined([entry(1, "a"), entry(2, "a"), entry(3, "b")]).map((l) => [l.entry[0], l.times])).toEqual([
      [2, 2],
      [3, 1],
    ]);
  });
});
