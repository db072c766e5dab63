import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { extent, path, ticks, uncovered } from "../src/curveplot.js";
import makeExplorer from "../src/explorer.js";
import { FakeModel, fakeLayout } from "./support.js";

const slider = (name, value, more = {}) => ({ name, kind: "number", default: value, low: 0, high: 4, step: 0.01, on: null, ...more });
const FORMS = [
  { name: "ppo", about: "Clipped <b>", formula: "r = exp(d)", params: [slider("low", 0.8), slider("c", null, { on: 3 }), { name: "stats", kind: "flag", default: false }] },
  { name: "plain", about: "Unclipped", formula: "-r A", params: [{ name: "kl_type", kind: "choice", default: "k3", choices: ["k1", "k2", "k3"] }] },
];
const curveOf = (more = {}) => ({
  loss: "ppo",
  params: { low: 0.8, c: null, stats: false },
  token: { ratio: 1.5, advantage: 1, old_logprob: -3, rollout_gap: 0, ref_gap: 0 },
  needs: ["logprobs", "advantages"],
  ratios: [0.125, 0.5, 1, 2, 8],
  values: [-0.125, -0.5, -1, -1.2, -1.2],
  gradients: [-0.125, -0.5, -1, 0, 0],
  regions: [{ kind: "clipped", low: 1.2, high: 8 }],
  mark: { ratio: 1.5, value: -1.2, gradient: 0, clipped: true, masked: false },
  metrics: { pg_clipfrac: 1 },
  ...more,
});

describe("the drawing", () => {
  it("finds round ticks and a range with 0 in it", () => {
    expect(ticks(-2.1, 0.1).map((v) => Number(v.toFixed(6)))).toEqual([-2, -1, 0]);
    expect(ticks(-2.1, 2.1).map((v) => Number(v.toFixed(6)))).toEqual([-2, 0, 2]);
    const [low, high] = extent([1, 2, null, Infinity]);
    expect(low).toBeLessThan(0);
    expect(high).toBeGreaterThan(2);
    expect(extent([0, 0])).toEqual([-1, 1]);
  });

  it("writes the name of a region where no other lies", () => {
    const clipped = { kind: "clipped", low: 1, high: 8 };
    const mask = (low, high) => ({ kind: "masked", low, high });
    expect(uncovered(clipped, [clipped])).toEqual([1, 8]);
    expect(uncovered(clipped, [mask(4, 8)])).toEqual([1, 4]);
    expect(uncovered(clipped, [mask(0.1, 2), mask(7, 9)])).toEqual([2, 7]);
    expect(uncovered(clipped, [mask(0.1, 9)])).toEqual([1, 1]);
    expect(uncovered(mask(2, 3), [clipped])).toEqual([2, 3]);
  });

  it("leaves a gap where there is no number", () => {
    expect(path([0, 1, 2, 3], [1, null, 2, 3])).toBe("M0.0 1.0M2.0 2.0L3.0 3.0");
  });
});

describe("the explorer", () => {
  const cleanups = [];
  beforeEach(() => {
    fakeLayout();
    vi.useFakeTimers();
  });
  afterEach(() => {
    cleanups.splice(0).forEach((clean) => clean());
    vi.useRealTimers();
  });

  async function explorer(views = 1) {
    const model = new FakeModel({ first: { forms: FORMS, curve: curveOf() } });
    const module = makeExplorer();
    cleanups.push(module.initialize({ model }));
    const els = Array.from({ length: views }, () => {
      const el = document.createElement("div");
      document.body.append(el);
      cleanups.push(module.render({ model, el }), () => el.remove());
      return el;
    });
    const answer = async (content) => {
      const sent = model.sent.shift();
      model.hear({ kind: "answer", id: sent.id, ...content });
      await vi.advanceTimersByTimeAsync(0);
      return sent;
    };
    await vi.advanceTimersByTimeAsync(700);
    await answer({ curve: curveOf() }); // the hello
    const field = (name, el = els[0]) => el.querySelector(`[data-field="${name}"]`);
    const slide = async (name, value, el) => {
      const range = field(name, el).querySelector("input[type=range]");
      range.value = String(value);
      range.dispatchEvent(new Event("input"));
      await vi.advanceTimersByTimeAsync(0);
    };
    const type = async (name, text) => {
      const box = field(name).querySelector("input[type=text]");
      box.value = text;
      box.dispatchEvent(new Event("change"));
      await vi.advanceTimersByTimeAsync(0);
    };
    const number = (name, el = els[0]) => el.querySelector(`[data-number="${name}"] dd`)?.textContent;
    return { model, els, el: els[0], answer, field, slide, type, number };
  }

  it("shows the curve, the mark and what is clipped, in words too", async () => {
    const { el, number } = await explorer();
    expect(number("value")).toBe("−1.20");
    expect(number("clipped")).toBe("yes");
    expect(number("masked")).toBe("no");
    const plot = el.querySelector("[data-plot=gradients] svg");
    expect(plot.getAttribute("aria-label")).toContain("at ratio 1.50: 0. clipped from 1.20 to 8");
    expect(plot.querySelectorAll("rect").length).toBe(2);
    expect(plot.querySelector(".xl-word").textContent).toBe("clipped");
    expect(el.querySelector(".xl-about").textContent).toBe("Clipped <b>");
    expect(el.querySelectorAll("input, select").length).toBe(el.querySelectorAll("[data-lm-suppress-shortcuts] input, [data-lm-suppress-shortcuts] select").length);
  });

  it("has a label for each control and shows only what the loss reads", async () => {
    const { el, field } = await explorer();
    for (const input of el.querySelectorAll("input[type=range], select")) {
      expect(input.closest("label") || el.querySelector(`label[for="${input.id}"]`), input.outerHTML).toBeTruthy();
    }
    expect(field("rollout_gap").hidden).toBe(true);
    expect(field("advantage").hidden).toBe(false);
  });

  it("asks for what a slider says, once at a time, the newest last", async () => {
    const { model, slide, answer, number, field } = await explorer();
    await slide("ratio", Math.log(2));
    await slide("low", 0.5);
    await slide("low", 0.6);
    expect(model.sent.length).toBe(1);
    const first = await answer({ curve: curveOf() });
    expect(first.token.ratio).toBe(2);
    const second = await answer({ curve: curveOf({ params: { low: 0.6, c: null, stats: false }, mark: { ...curveOf().mark, value: -2 } }) });
    expect(second.params.low).toBe(0.6);
    expect(number("value")).toBe("−2");
    expect(model.sent).toEqual([]);
    expect(field("low").querySelector("input[type=text]").value).toBe("0.6");
  });

  it("sends what is typed as it is, and shows why it is not taken", async () => {
    const { el, type, answer, number } = await explorer();
    await type("low", "-1");
    const sent = await answer({ error: "low is -1: pass a number >= 0" });
    expect(sent.params.low).toBe(-1);
    expect(el.querySelector(".xl-wrong").textContent).toBe("low is -1: pass a number >= 0");
    expect(number("value")).toBe("−1.20");
    await type("low", "many");
    expect((await answer({ error: "no" })).params.low).toBe("many");
    await type("low", "0.7");
    await answer({ curve: curveOf() });
    expect(el.querySelector(".xl-wrong").textContent).toBe("");
  });

  it("switches off what may be off, and on again where it was", async () => {
    const { field, answer, slide } = await explorer();
    const box = field("c").querySelector("input[type=checkbox]");
    const range = field("c").querySelector("input[type=range]");
    expect([box.checked, range.disabled]).toEqual([false, true]);
    const turn = async () => {
      box.checked = !box.checked;
      box.dispatchEvent(new Event("change"));
      await vi.advanceTimersByTimeAsync(0);
    };
    await turn();
    expect((await answer({ curve: curveOf({ params: { low: 0.8, c: 3, stats: false } }) })).params.c).toBe(3);
    expect(range.disabled).toBe(false);
    await slide("c", 2.5);
    await answer({ curve: curveOf({ params: { low: 0.8, c: 2.5, stats: false } }) });
    await turn();
    expect((await answer({ curve: curveOf() })).params.c).toBe(null);
    await turn();
    expect((await answer({ curve: curveOf() })).params.c).toBe(2.5);
  });

  it("remembers the parameters of each loss; flags and choices are told", async () => {
    const { el, model, answer, field } = await explorer();
    const choose = async (select, value) => {
      select.value = value;
      select.dispatchEvent(new Event("change"));
      await vi.advanceTimersByTimeAsync(0);
    };
    const loss = el.querySelector("select[name=loss]");
    await choose(loss, "plain");
    const plain = curveOf({ loss: "plain", params: { kl_type: "k3" }, regions: [], needs: ["logprobs", "advantages", "ref_logprobs"] });
    expect((await answer({ curve: plain })).params).toEqual({});
    expect(field("ref_gap").hidden).toBe(false);
    await choose(field("kl_type").querySelector("select"), "k1");
    expect((await answer({ curve: { ...plain, params: { kl_type: "k1" } } })).params).toEqual({ kl_type: "k1" });
    await choose(loss, "ppo");
    expect((await answer({ curve: curveOf() })).params.low).toBe(0.8);
    const box = field("stats").querySelector("input");
    box.checked = true;
    box.dispatchEvent(new Event("change"));
    await vi.advanceTimersByTimeAsync(0);
    expect((await answer({ curve: curveOf() })).params.stats).toBe(true);
    expect(model.sent).toEqual([]);
  });

  it("goes back to the defaults", async () => {
    const { el, slide, answer } = await explorer();
    await slide("low", 0.1);
    await answer({ curve: curveOf({ params: { low: 0.1, c: null, stats: false } }) });
    el.querySelectorAll(".xl-buttons button")[0].click();
    await vi.advanceTimersByTimeAsync(0);
    const sent = await answer({ curve: curveOf() });
    expect(sent.params).toEqual({ low: 0.8, c: null, stats: false });
    expect(sent.token.ratio).toBe(1);
  });

  it("keeps a curve to compare, in every view", async () => {
    const { els } = await explorer(2);
    els[0].querySelectorAll(".xl-buttons button")[1].click();
    for (const el of els) {
      expect(el.querySelectorAll(".xl-kept").length).toBe(2);
      expect(el.querySelector(".xl-keptword").textContent).toContain("ppo: ratio 1.50");
    }
    els[1].querySelectorAll(".xl-buttons button")[1].click();
    expect(els[0].querySelector(".xl-kept")).toBe(null);
  });

  it("takes the mark to where the mouse points", async () => {
    const { el, answer } = await explorer();
    const svg = el.querySelector("[data-plot=values] svg");
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 100, buttons: 0 }));
    svg.dispatchEvent(new PointerEvent("pointerdown", { clientX: 46 + 244, buttons: 1 }));
    await vi.advanceTimersByTimeAsync(0);
    expect((await answer({ curve: curveOf() })).token.ratio).toBe(8);
  });

  it("shows after a reload what the kernel was asked last, and leaves nothing behind", async () => {
    const { model, els } = await explorer();
    expect(els[0].querySelector("select[name=loss]").value).toBe("ppo");
    cleanups.splice(0).forEach((clean) => clean());
    expect(model.listeners.get("msg:custom")).toEqual([]);
    const module = makeExplorer();
    cleanups.push(module.initialize({ model }));
    const el = document.createElement("div");
    document.body.replaceChildren(el);
    cleanups.push(module.render({ model, el }));
    await vi.advanceTimersByTimeAsync(700);
    model.hear({ kind: "answer", id: model.sent.at(-1).id, curve: curveOf({ loss: "plain", params: { kl_type: "k2" } }) });
    await vi.advanceTimersByTimeAsync(0);
    expect(el.querySelector("select[name=loss]").value).toBe("plain");
    expect(el.querySelector("select[name=kl_type]").value).toBe("k2");
  });

  it("says so when the kernel does not answer", async () => {
    const model = new FakeModel({ first: { forms: FORMS, curve: curveOf() } });
    const module = makeExplorer();
    cleanups.push(module.initialize({ model }));
    const el = document.createElement("div");
    cleanups.push(module.render({ model, el }));
    await vi.advanceTimersByTimeAsync(7000);
    expect(el.querySelector(".xl-wrong").textContent).toContain("run the cell again");
  });
});
