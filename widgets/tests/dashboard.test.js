import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import makeControls from "../src/controls.js";
import makeDashboard from "../src/dashboard.js";
import { hubOf } from "../src/hub.js";
import { FakeModel, fakeLayout, fakePlots, frame, panel, snapshotOf, wire } from "./support.js";

let count = 0;
const cleanups = [];

async function dashboard(runs, panels) {
  count += 1;
  const group = `group-${count}`;
  const model = new FakeModel({ group, snapshot: { runs, panels, knobs: { learning_rate: 1e-4 } } });
  const module = makeDashboard();
  const stop = module.initialize({ model });
  const el = document.createElement("div");
  document.body.replaceChildren(el);
  const remove = module.render({ model, el });
  cleanups.push(remove, stop);
  await frame();
  await frame();
  return { group, model, module, el, stop, remove, find: (s) => el.querySelector(s), all: (s) => [...el.querySelectorAll(s)] };
}

const one = () => dashboard([snapshotOf([1, 2, 3], { reward: [0.1, 0.2, 0.3], loss: [3, 2, 1] })], [panel("reward", ["reward"]), panel("loss", ["loss"])]);
const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));

let made;
afterEach(() => cleanups.splice(0).forEach((clean) => clean()));
beforeEach(() => {
  fakeLayout();
  made = fakePlots();
});

describe("the dashboard", () => {
  it("draws a chart per panel with the newest values", async () => {
    const { all, find } = await one();
    expect(all(".xl-panel").map((p) => p.dataset.panel)).toEqual(["reward", "loss"]);
    expect(all(".xl-legend output").map((o) => o.textContent)).toEqual(["0.300", "1"]);
    expect(find(".xl-state").textContent).toContain("running");
    expect(find(".xl-steps").textContent).toBe("step 3 of 10");
    expect(find(".xl-times").textContent).toContain("about 1 min 00 s left");
    expect(made.length).toBe(2);
  });

  it("draws what comes", async () => {
    const { model, all, find } = await one();
    const status = { state: "paused", step: 4, total: 10, message: "by hand", seconds: 13, left: null };
    model.hear({ kind: "delta", runs: [{ run: 0, after: 3, rows: 1, status, events: [[1, 0, 4, "warning", "<b>careful</b>"]] }] }, [wire([4], { reward: [0.9], loss: [0.5] })]);
    await frame();
    expect(all(".xl-legend output").map((o) => o.textContent)).toEqual(["0.900", "0.500"]);
    expect(made[0].data[0]).toEqual([1, 2, 3, 4]);
    expect(find(".xl-state").textContent).toContain("paused");
    expect(find(".xl-said").textContent).toContain("<b>careful</b>");
    expect(find(".xl-said").children.length).toBe(0);
    expect(find("[aria-live]").textContent).toContain("paused");
  });

  it("adds a panel when a metric comes that there was not", async () => {
    const { model, all } = await one();
    model.hear({ kind: "delta", panels: [panel("reward", ["reward"]), panel("loss", ["loss"]), panel("kl", ["kl"])], runs: [{ run: 0, after: 3, rows: 1, names: ["reward", "loss", "kl"] }] }, [wire([4], { reward: [1], loss: [1], kl: [0.25] })]);
    await frame();
    await frame();
    expect(all(".xl-panel").length).toBe(3);
    expect(all(".xl-legend output").at(-1).textContent).toBe("0.250");
  });

  it("asks for everything when steps are missing, once", async () => {
    const { model, group } = await one();
    const asked = [];
    hubOf(group).connect(async (content) => (asked.push(content), { content: {}, buffers: [] }));
    for (const step of [9, 10]) model.hear({ kind: "delta", runs: [{ run: 0, after: step - 1, rows: 1 }] }, [wire([step], { reward: [1], loss: [1] })]);
    await frame();
    expect(asked).toEqual([{ kind: "again" }]);
  });

  it("asks for everything when the kernel has more", async () => {
    const { group } = await one();
    const asked = [];
    hubOf(group).connect(async (content) => (asked.push(content), { content: {}, buffers: [] }));
    hubOf(group).tell("heads", [[3, 0]]);
    await frame();
    expect(asked).toEqual([]);
    hubOf(group).tell("heads", [[4, 0]]);
    await frame();
    expect(asked).toEqual([{ kind: "again" }]);
  });

  it("links the crosshairs, moved by keys, and says where they are", async () => {
    const { find, all } = await one();
    const charts = find(".xl-grid");
    key(charts, "ArrowRight");
    key(charts, "ArrowRight");
    expect(made.map((plot) => plot.at)).toEqual([2, 2]);
    expect(find(".xl-where").textContent).toBe("step 2");
    expect(all(".xl-legend output").map((o) => o.textContent)).toEqual(["0.200", "2"]);
    expect(find("[aria-live]").textContent).toContain("reward reward 0.200");
    key(charts, "End");
    expect(find(".xl-where").textContent).toBe("step 3");
    key(charts, "Escape");
    expect(find(".xl-where").textContent).toBe("");
  });

  it("keeps shortcuts from the notebook", async () => {
    const { all, find } = await one();
    const focusable = all("button, input, summary, [tabindex]");
    expect(focusable.length).toBeGreaterThan(5);
    for (const element of [find(".xl-root"), ...focusable]) {
      expect(element.getAttribute("data-lm-suppress-shortcuts")).toBe("true");
    }
  });

  it("zooms, and asks for the steps that it only has thinned", async () => {
    const thin = snapshotOf([1, 50, 100], { reward: [0, 1, 2] }, { exact: 101 });
    const { group, find } = await dashboard([thin], [panel("reward", ["reward"])]);
    const asked = [];
    const detail = { content: { names: ["reward"], rows: 3, exact: 0 }, buffers: [wire([10, 11, 12], { reward: [5, 6, 7] })] };
    hubOf(group).connect(async (content) => (asked.push(content), detail));
    made[0].options.hooks.setSelect[0]({ select: { left: 10, width: 10 }, posToVal: (v) => v, setSelect() {} });
    expect(made[0].options.scales.x.range()).toEqual([10, 20]);
    await new Promise((go) => setTimeout(go, 300));
    expect(asked).toEqual([{ kind: "part", run: 0, low: 10, high: 20 }]);
    expect(made.at(-1).data[0]).toEqual([10, 11, 12]);
    find(".xl-tools .xl-button").click();
    await frame();
    expect(made.at(-1).data[0]).toEqual([1, 50, 100]);
  });

  it("tells runs apart by colour and dash", async () => {
    const runs = [snapshotOf([1, 2], { reward: [1, 2] }), snapshotOf([2, 3], { reward: [3, 4] }, { name: "another" })];
    const { all } = await dashboard(runs, [panel("reward", ["reward"])]);
    const [, first, second] = made[0].options.series;
    expect(first.stroke).not.toBe(second.stroke);
    expect(first.dash).not.toEqual(second.dash);
    expect(all(".xl-label").map((l) => l.textContent)).toEqual(["a run", "another"]);
    expect(made[0].data[0]).toEqual([1, 2, 3]);
  });

  it("hides a line on request", async () => {
    const { all } = await dashboard([snapshotOf([1, 2], { a: [1, 2], b: [3, 4] })], [panel("both", ["a", "b"])]);
    all(".xl-legend button")[0].click();
    expect(made.at(-1).options.series.length).toBe(2);
    expect(all(".xl-legend button")[0].getAttribute("aria-pressed")).toBe("false");
  });

  it("says of a hidden line that it is hidden when the legend is built anew", async () => {
    const { model, all } = await dashboard([snapshotOf([1, 2], { a: [1, 2], b: [3, 4] })], [panel("all", ["a", "b", "c"])]);
    all(".xl-legend button")[0].click();
    model.hear({ kind: "delta", runs: [{ run: 0, after: 2, rows: 1, names: ["a", "b", "c"] }] }, [wire([3], { a: [1], b: [1], c: [1] })]);
    await frame();
    expect(all(".xl-legend button").map((b) => b.getAttribute("aria-pressed"))).toEqual(["false", "true", "true"]);
    expect(made.at(-1).options.series.length).toBe(3); // the steps and two lines
  });

  it("offers a line that is hidden again when it is the only one left", async () => {
    const { model, all } = await dashboard([snapshotOf([1, 2], { a: [1, 2], b: [3, 4] })], [panel("both", ["a", "b"])]);
    all(".xl-legend button")[0].click();
    model.change("snapshot", { runs: [snapshotOf([1], { a: [1] })], panels: [panel("both", ["a", "b"])], knobs: {} });
    await frame();
    expect(all(".xl-legend button").map((b) => b.getAttribute("aria-pressed"))).toEqual(["false"]);
  });

  it("draws what came before the first step at the first step", async () => {
    const marks = [
      [1, 0, 0, "knob", "before all"],
      [2, 0, 12, "pause", "paused"],
    ];
    await dashboard([snapshotOf([11, 12, 13], { reward: [1, 2, 3] }, { marks, event: 2 })], [panel("reward", ["reward"])]);
    const drawn = [];
    const ctx = new Proxy({ fillText: (glyph, x) => drawn.push([glyph, x]) }, { get: (own, name) => own[name] ?? (() => {}), set: () => true });
    made[0].options.hooks.draw[0]({ ctx, bbox: { left: 0, top: 0, width: 100, height: 100 }, valToPos: (v) => 5 * v });
    expect(drawn).toEqual([["◆", 55], ["‖", 60]]);
  });

  it("is drawn anew when the theme changes", async () => {
    await one();
    const before = made.length;
    document.body.dataset.jpThemeLight = "false";
    await new Promise((go) => setTimeout(go, 20));
    await frame();
    expect(made.length).toBeGreaterThan(before);
    expect(made.at(-1).options.series[1].stroke).toBe("#56B4E9");
    delete document.body.dataset.jpThemeLight;
  });

  it("leaves nothing behind", async () => {
    const { model, remove, stop, el } = await one();
    remove();
    stop();
    expect(made.every((plot) => plot.destroyed)).toBe(true);
    expect(model.listeners.get("msg:custom")).toEqual([]);
    expect(el.querySelector(".xl-panel")).toBeNull();
  });
});

describe("the controls", () => {
  function controls(values = {}) {
    count += 1;
    const group = `group-${count}`;
    const model = new FakeModel({ group, reason: "", knobs: { learning_rate: 1e-4 }, ...values });
    const module = makeControls();
    vi.useFakeTimers();
    cleanups.push(module.initialize({ model }), () => vi.useRealTimers());
    const el = document.createElement("div");
    document.body.replaceChildren(el);
    module.render({ model, el });
    const meet = async () => {
      await vi.advanceTimersByTimeAsync(700);
      model.hear({ kind: "answer", id: model.sent.pop().id, heads: [] });
      await vi.advanceTimersByTimeAsync(0);
    };
    const settle = () => vi.advanceTimersByTimeAsync(0);
    const button = (name) => [...el.querySelectorAll("button")].find((b) => b.textContent.trim().endsWith(name));
    const state = (now, knobs = { learning_rate: 1e-4 }) => hubOf(group).tell("state", { status: { state: now }, knobs, name: "a run" });
    return { meet, settle, model, el, button, state, field: el.querySelector("input"), note: el.querySelector(".xl-reason") };
  }

  it("sends what is clicked", async () => {
    const { model, button, state, meet, settle } = controls();
    await meet();
    state("running");
    button("Pause").click();
    state("paused");
    button("Resume").click();
    button("Step").click();
    button("Stop").click();
    await settle();
    expect(model.sent.map((m) => m.kind)).toEqual(["pause", "resume", "step", "stop"]);
  });

  it("offers what makes sense", () => {
    const { button, state, note } = controls();
    state("running");
    expect(button("Resume").disabled).toBe(true);
    expect(button("Pause").disabled).toBe(false);
    state("finished");
    expect(["Pause", "Resume", "Step", "Stop"].every((name) => button(name).disabled)).toBe(true);
    expect(note.textContent).toContain("ended");
  });

  it("is disabled without commands, and says why", () => {
    const { button, field, note } = controls({ reason: "not from here" });
    expect(button("Stop").disabled).toBe(true);
    expect(field.disabled).toBe(true);
    expect(note.textContent).toBe("not from here");
  });

  it("sets a knob, and shows what the kernel says", async () => {
    const { model, el, field, note, state, meet, settle } = controls();
    await meet();
    state("running");
    expect(field.value).toBe("1e-4");
    field.value = "3e-5";
    field.dispatchEvent(new Event("input"));
    key(field, "Enter");
    await settle();
    expect(model.sent[0]).toMatchObject({ kind: "set", name: "learning_rate", value: 3e-5 });
    model.hear({ kind: "answer", id: model.sent[0].id, error: "out of range" });
    await settle();
    expect(note.textContent).toBe("out of range");
    state("running", { learning_rate: 5e-5 });
    expect(field.value).toBe("3e-5"); // what was typed is not overwritten
  });

  it("keeps what is clicked until the kernel has answered the first time", async () => {
    const { model, button, state, meet, settle } = controls();
    state("running");
    button("Pause").click();
    await settle();
    expect(model.sent).toEqual([]);
    await meet();
    expect(model.sent.map((m) => m.kind)).toEqual(["pause"]);
  });

  it("says how to stop when the kernel does not answer", async () => {
    const { model, note, button, state } = controls();
    state("running");
    await vi.advanceTimersByTimeAsync(7000);
    expect(note.textContent).toContain("interrupt the kernel");
    button("Stop").click();
    await vi.advanceTimersByTimeAsync(0);
    expect(model.sent.at(-1).kind).toBe("stop"); // heard once the cell is done
    model.hear({ kind: "answer", id: model.sent[0].id });
    expect(note.textContent).toBe("");
  });

  it("does not send what is no number", async () => {
    const { model, el, field, state, meet, settle } = controls();
    await meet();
    state("running");
    field.value = "abc";
    field.dispatchEvent(new Event("input"));
    el.querySelector("form").dispatchEvent(new Event("submit", { cancelable: true }));
    await settle();
    expect(model.sent).toEqual([]);
    expect(field.getAttribute("aria-invalid")).toBe("true");
  });
});
