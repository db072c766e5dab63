import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Lineage, written } from "../src/lineage.js";
import makeShelf from "../src/shelf.js";
import { prompts, size, span, shown } from "../src/shelfwords.js";
import { grade } from "../src/sidebyside.js";
import { FakeModel, fakeLayout } from "./support.js";

const saved = (run, step, more = {}) => ({ name: `${run}/step-${step}`, run, step, kind: "weights", parent: null, megabytes: 2, created: 1000 + step, expires: null, metrics: { reward: step / 100 }, settings: 0, held: "", ...more });
const run = (name, parent = null, state = "finished") => ({ name, kind: "grpo", state, parent, model: "tiny" });
const treeOf = (checkpoints, runs, more = {}) => ({ checkpoints, runs, settings: [{ learning_rate: 1e-4, steps: 60 }, { learning_rate: 3e-5, steps: 60 }], disk: { used: 8e6, budget: 1e7 }, metrics: ["reward", "kl_base"], main: ["reward"], ...more });
const family = () =>
  treeOf(
    [saved("a", 40, { metrics: { reward: 0.4, kl_base: null }, parent: "a/step-20" }), saved("a", 20), saved("b", 50, { parent: "a/step-20", settings: 1 }), saved("c", 9, { kind: "sampler_weights" })],
    [run("a"), run("b", "a/step-20", "running"), run("c", "a/step-30")],
  );
const names = (rows) => rows.map((row) => `${"  ".repeat(row.level - 1)}${row.label}`);

describe("the lineage", () => {
  it("puts branches below what they come from, and shows what was deleted", () => {
    const rows = new Lineage(family()).rows(new Set(), "");
    expect(names(rows)).toEqual(["base", "  a", "    step-20", "      b", "        step-50", "    step-30", "      c", "        step-9", "    step-40"]);
    expect(rows[5].node.kind).toBe("gone");
    expect(rows.map((row) => row.expanded)).toEqual([true, true, true, true, null, true, true, null, null]);
    expect(rows[3].guides).toEqual([false, true, false]);
  });

  it("hides what is closed, unless it is looked for", () => {
    const lineage = new Lineage(family());
    expect(names(lineage.rows(new Set(["run a"]), ""))).toEqual(["base", "  a"]);
    expect(names(lineage.rows(new Set(["run a"]), "b/ finished"))).toEqual([]);
    expect(names(lineage.rows(new Set(["run a"]), "step-50 resumable"))).toEqual(["base", "  a", "    step-20", "      b", "        step-50"]);
    expect(names(lineage.rows(new Set(), "learning_rate=3e-5")).at(-1).trim()).toBe("step-50");
    expect(lineage.rows(new Set(), "nothing such")).toEqual([]);
  });

  it("orders by a metric; what has no value comes last either way", () => {
    const lineage = new Lineage(family());
    expect(names(lineage.list({ by: "metric reward", down: true }, ""))).toEqual(["b/step-50", "a/step-40", "a/step-20", "c/step-9"]);
    const tree = family();
    tree.checkpoints[0].metrics.kl_base = 0.5;
    tree.checkpoints[1].metrics.kl_base = 0.1;
    const some = new Lineage(tree);
    for (const down of [true, false]) {
      expect(names(some.list({ by: "metric kl_base", down }, "")).slice(2).sort()).toEqual(["b/step-50", "c/step-9"]);
    }
    expect(names(some.list({ by: "metric kl_base", down: false }, "")).slice(0, 2)).toEqual(["a/step-20", "a/step-40"]);
  });

  it("loses nothing where the lineage is broken", () => {
    const circle = treeOf([saved("a", 1), saved("b", 1), saved("lost", 1)], [run("a", "b/step-1"), run("b", "a/step-1"), run("c", "c/step-1"), run("d", "away/step-3")]);
    const shown = names(new Lineage(circle).rows(new Set(), "")).map((name) => name.trim());
    for (const name of ["a", "b", "c", "d", "lost", "away/step-3"]) expect(shown.filter((s) => s === name).length, name).toBe(1);
  });

  it("keeps apart what was saved twice under one name", () => {
    const rows = new Lineage(treeOf([saved("a", 1), saved("a", 1, { kind: "lora (sampling alone)" })], [run("a")])).rows(new Set(), "");
    expect(new Set(rows.map((row) => row.node.key)).size).toBe(4);
  });

  it("takes a thousand checkpoints in a moment", () => {
    const many = Array.from({ length: 1000 }, (_, i) => saved(`run-${i % 20}`, Math.floor(i / 20)));
    const tree = treeOf(many, Array.from({ length: 20 }, (_, i) => run(`run-${i}`, i ? `run-${i - 1}/step-3` : null)));
    const begun = performance.now();
    expect(new Lineage(tree).rows(new Set(), "").length).toBe(1021);
    expect(performance.now() - begun).toBeLessThan(100);
  });
});

describe("words", () => {
  it("spells what cannot be seen", () => {
    expect(shown("a\u202eb\u0000c\u200bd\ne")).toBe("a⟨202E⟩b⟨0000⟩c⟨200B⟩d\ne");
    expect(shown("x\u200d \u200dy \ud800")).toBe("x\u200d ⟨200D⟩y ⟨D800⟩");
    const family = "👨‍👩‍👧 é 漢字 ক্‍ষ";
    expect(shown(family)).toBe(family);
  });

  it("reads prompts by line, or by empty lines", () => {
    expect(prompts("one\ntwo\n")).toEqual(["one", "two"]);
    expect(prompts("one\r\nmore\r\n\r\n\r\ntwo\n")).toEqual(["one\nmore", "two"]);
    expect(prompts("  \n\n")).toEqual([]);
    expect(prompts("def f():\n    return\n\n  indented")).toEqual(["def f():\n    return", "  indented"]);
  });

  it("says sizes and spans as a person reads them", () => {
    expect([999, 4_200_000, 12_300_000_000, NaN].map(size)).toEqual(["999 B", "4.2 MB", "12 GB", "–"]);
    expect([5, 61, 7300, 200_000].map(span)).toEqual(["<1 min", "1 min", "2 h", "2 d"]);
    expect([1e-4, 60, "cispo", null, true].map(written)).toEqual(["1e-4", "60", "cispo", "null", "true"]);
  });

  it("grades differences evenly on both sides", () => {
    expect([0.05, 0.1, -0.1, 0.7, -2, 3, -9, null, NaN].map(grade)).toEqual([0, 1, -1, 2, -3, 4, -4, 0, 0]);
  });
});

describe("the browser", () => {
  const cleanups = [];
  beforeEach(() => {
    fakeLayout();
    Object.defineProperty(HTMLElement.prototype, "clientHeight", { configurable: true, get: () => 300 });
    Object.defineProperty(HTMLElement.prototype, "offsetHeight", { configurable: true, get: () => 25 });
    vi.useFakeTimers();
  });
  afterEach(() => {
    cleanups.splice(0).forEach((clean) => clean());
    vi.useRealTimers();
  });

  async function shelf(tree = family()) {
    const model = new FakeModel({ first: { tree, mark: "m0" } });
    const module = makeShelf();
    const stop = module.initialize({ model });
    const el = document.createElement("div");
    document.body.replaceChildren(el);
    const remove = module.render({ model, el });
    cleanups.push(stop, remove);
    const settle = () => vi.advanceTimersByTimeAsync(0);
    const answer = async (kind, content) => {
      const at = model.sent.findIndex((sent) => sent.kind === kind);
      const [sent] = model.sent.splice(at, 1);
      model.hear({ kind: "answer", id: sent.id, ...content });
      await settle();
      return sent;
    };
    await vi.advanceTimersByTimeAsync(700);
    await answer("hello", {});
    await answer("tree", { mark: "m0" });
    const all = (s) => [...el.querySelectorAll(s)];
    const find = (s) => el.querySelector(s);
    const grid = find("[role='treegrid']");
    const press = (key, target = grid, more = {}) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
    const chosen = () => find("[aria-selected='true'][role='row'] .xl-name").title;
    const tab = (text) => all("[role='tab']").find((b) => b.textContent === text);
    const button = (text) => all("button").filter((b) => !b.closest("[hidden]")).find((b) => b.textContent.includes(text));
    const type = (element, value) => {
      element.value = value;
      element.dispatchEvent(new Event("input", { bubbles: true }));
    };
    const panel = () => all("[role='tabpanel']").find((p) => !p.hidden);
    return { model, el, all, find, grid, press, chosen, tab, button, type, panel, answer, settle, remove, stop };
  }

  it("shows a tree with roles, and what each checkpoint achieved", async () => {
    const { all, grid, find } = await shelf();
    expect(all(".xl-row").map((row) => [row.getAttribute("aria-level"), row.querySelector(".xl-name").textContent])).toEqual([["1", "base"], ["2", "a"], ["3", "step-20"], ["4", "b"], ["5", "step-50"], ["3", "step-30"], ["4", "c"], ["5", "step-9"], ["3", "step-40"]]);
    expect(grid.getAttribute("aria-rowcount")).toBe("10");
    expect(find(`#${grid.getAttribute("aria-activedescendant")}`).getAttribute("aria-selected")).toBe("true");
    expect(all("[role='columnheader']").map((c) => c.textContent)).toEqual(["Name", "Step", "reward", "Size", "Age", "Expires", "Kind"]);
    expect(all(".xl-row")[2].querySelectorAll("[role='gridcell']")[2].textContent).toBe("0.200");
    expect(find(".xl-diskwords").textContent).toContain("8.0 MB of 10 MB (80 %)");
    expect(all(".xl-row")[3].textContent).toContain("running");
  });

  it("is walked by keys", async () => {
    const { press, chosen, all, tab } = await shelf();
    expect(chosen()).toBe("b/step-50"); // the newest
    press("ArrowLeft");
    expect(chosen()).toBe("b");
    press("ArrowLeft");
    expect(all(".xl-row").length).toBe(8);
    press("ArrowLeft");
    expect(chosen()).toBe("a/step-20");
    press("ArrowRight");
    press("ArrowRight");
    press("ArrowDown");
    expect(all(".xl-row").length).toBe(9);
    expect(chosen()).toBe("b/step-50");
    press("Home");
    expect(chosen()).toBe("base");
    for (const letter of "step-4") press(letter);
    expect(chosen()).toBe("a/step-40");
    press("Enter");
    expect(document.activeElement).toBe(tab("Details"));
    press("Escape", document.activeElement);
    expect(document.activeElement.getAttribute("role")).toBe("treegrid");
  });

  it("orders by a column and comes back", async () => {
    const { all, button, chosen } = await shelf();
    const head = () => all("[role='columnheader']")[2];
    head().querySelector("button").click();
    expect(head().getAttribute("aria-sort")).toBe("descending");
    expect(all(".xl-row .xl-name").map((n) => n.textContent)).toEqual(["b/step-50", "a/step-40", "a/step-20", "c/step-9"]);
    head().querySelector("button").click();
    expect(all(".xl-row .xl-name")[0].textContent).toBe("c/step-9");
    expect(chosen()).toBe("b/step-50");
    button("By lineage").click();
    expect(all(".xl-row").length).toBe(9);
  });

  it("shows only the rows in sight of many", async () => {
    const many = Array.from({ length: 1000 }, (_, i) => saved("a", i));
    const { all, grid } = await shelf(treeOf(many, [run("a")]));
    expect(grid.getAttribute("aria-rowcount")).toBe("1003");
    expect(all(".xl-row").length).toBeLessThan(40);
    expect(all(".xl-row[aria-selected='true']").length).toBe(1);
  });

  it("says how settings differ from the parent's, and why something cannot be done", async () => {
    const { find, tab, panel, press, button, el } = await shelf(treeOf([...family().checkpoints.slice(0, 3), saved("c", 9, { kind: "sampler_weights", held: "c would resume from it" })], family().runs));
    expect(find(".xl-changed").textContent).toBe("learning_rate3e-5≠ was 1e-4");
    press("Home");
    tab("Delete").click();
    expect(panel().textContent).toContain("no checkpoint");
    expect(button("Delete …").disabled).toBe(true);
    for (const letter of "step-9") press(letter);
    expect(panel().textContent).toContain("c would resume from it");
    tab("Branch").click();
    expect(panel().textContent).toContain("for sampling only");
    expect(button("Start a run").disabled).toBe(true);
    expect(el.querySelectorAll(".xl-tab.xl-dim").length).toBe(3);
  });

  it("branches, and says how to show the run", async () => {
    const { tab, panel, type, button, answer, settle } = await shelf();
    tab("Branch").click();
    const [rate] = panel().querySelectorAll("input");
    expect(rate.placeholder).toBe("3e-5, as before");
    type(rate, "1e-5");
    type(panel().querySelector("textarea"), "kl_coef=0.1");
    button("Start a run").click();
    await settle();
    expect(button("Start a run").disabled).toBe(true);
    await vi.advanceTimersByTimeAsync(3000);
    expect(panel().querySelector(".xl-clock").textContent).toBe("3 s");
    const sent = await answer("branch", { run: "<b>grpo-9</b>" });
    expect(sent).toMatchObject({ checkpoint: "b/step-50", fields: { learning_rate: "1e-5", steps: "" }, lines: "kl_coef=0.1" });
    expect(panel().textContent).toContain('lab.run("<b>grpo-9</b>")');
    expect(panel().querySelector("b")).toBeNull();
    await answer("tree", { mark: "m1", tree: treeOf(family().checkpoints, [...family().runs, run("grpo-9", "b/step-50", "running")]) });
  });

  it("samples, with everything as text", async () => {
    const { tab, panel, type, answer, settle, press } = await shelf();
    tab("Sample").click();
    const prompt = panel().querySelector("textarea");
    type(prompt, "<i>two</i>");
    press("Enter", prompt, { ctrlKey: true });
    await settle();
    const sent = await answer("sample", { samples: [{ text: "<script>x()</script>\u202e", tokens: 3, stop: "length", logprob: -1.5 }] });
    expect(sent).toMatchObject({ checkpoint: "b/step-50", prompt: "<i>two</i>", params: { n: "2", temperature: "1" } });
    expect(panel().querySelector(".xl-text").textContent).toBe("<script>x()</script>⟨202E⟩");
    expect(panel().querySelector("script, i")).toBeNull();
    expect(panel().querySelector("li").textContent).toContain("cut off, 3 tokens, −1.50 nats");
    press("Enter", prompt, { ctrlKey: true });
    await settle();
    await answer("sample", { error: "temperature is 'x': pass a number" });
    expect(panel().querySelector(".xl-note-line").textContent).toBe("✕ temperature is 'x': pass a number");
    expect(panel().querySelectorAll(".xl-result").length).toBe(1);
  });

  it("compares token by token", async () => {
    const { tab, panel, type, answer, settle, press, grid, button } = await shelf();
    tab("Compare").click();
    for (const letter of "step-4") press(letter);
    press(" ", grid); // the selected one with itself
    expect(panel().textContent).toContain("compares a checkpoint with itself");
    press("Home");
    press("ArrowDown");
    press("ArrowDown");
    expect(panel().querySelector("select").value).toBe("a/step-40");
    type(panel().querySelector("textarea"), "one\ntwo");
    panel().querySelector(".xl-main").click();
    await settle();
    const side = (pieces, logprobs, other) => ({ pieces, logprobs, other });
    const results = [
      { prompt: "one", left: side(["x", "\n", "<b>"], [-1, -1, -0.5], [-1, -1.2, -4]), right: side(["x", "\n"], [-1, -1], [-1, -0.2]), divergence: 2 },
      { prompt: "two", left: side(["y"], [-1], [null]), right: side(["y"], [-1], [-1]), divergence: null },
    ];
    const sent = await answer("compare", { results });
    expect(sent).toMatchObject({ left: "a/step-20", right: "a/step-40", prompts: ["one", "two"] });
    const [first, second] = panel().querySelectorAll(".xl-result");
    expect([...first.querySelectorAll(".xl-left .xl-token")].map((t) => [t.textContent, t.dataset.grade])).toEqual([["x", "0"], ["⏎\n", "1"], ["<b>", "4"]]);
    expect([...first.querySelectorAll(".xl-right .xl-token")].map((t) => t.dataset.grade)).toEqual(["0", "-2"]);
    expect(first.querySelectorAll(".xl-fork").length).toBe(2);
    expect(first.querySelector(".xl-right").textContent).toContain("ends here");
    expect(second.querySelector(".xl-readout").textContent).toBe("The answers are the same.");
    const tokens = [...first.querySelectorAll(".xl-left .xl-token")];
    tokens[2].focus();
    tokens[2].dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
    expect(first.querySelector(".xl-readout").textContent).toContain('token 3: "<b>" · own −0.500 · other −4 · difference +3.50 nats');
    expect(panel().querySelector(".xl-note-line").textContent).toContain("1 of 2 prompts answered differently");
  });

  it("deletes only when it is told twice", async () => {
    const { tab, panel, button, answer, settle, model, press } = await shelf();
    tab("Delete").click();
    expect(panel().textContent).toContain("Frees 2.0 MB");
    button("Delete …").click();
    expect(document.activeElement.textContent).toBe("Cancel");
    expect(panel().querySelector("[role='alertdialog']").textContent).toContain("Delete b/step-50 (2.0 MB, step 50)");
    press("Escape", document.activeElement);
    expect(panel().querySelector("[role='alertdialog']").hidden).toBe(true);
    expect(document.activeElement.textContent).toBe("Delete …");
    button("Delete …").click();
    button("Delete it").click();
    await settle();
    expect(model.sent.filter((sent) => sent.kind === "delete").length).toBe(1);
    await answer("delete", {});
    const left = family().checkpoints.filter((c) => c.name !== "b/step-50");
    await answer("tree", { mark: "m1", tree: treeOf(left, family().runs) });
    expect(panel().textContent).toContain("b/step-50 was deleted");
  });

  it("does not delete another one when the selection moves on", async () => {
    const { tab, panel, button, press } = await shelf();
    tab("Delete").click();
    button("Delete …").click();
    press("ArrowUp");
    press("ArrowUp");
    expect(panel().querySelector("[role='alertdialog']").hidden).toBe(true);
  });

  it("exports to a folder", async () => {
    const { tab, panel, type, button, answer, settle } = await shelf();
    tab("Export").click();
    expect(panel().querySelector(".xl-main").disabled).toBe(true);
    expect(panel().textContent).toContain("Write a folder.");
    panel().querySelectorAll("input[type='radio']")[1].checked = true;
    type(panel().querySelector("input[type='text']"), "out");
    panel().querySelector(".xl-main").click();
    await settle();
    expect(await answer("export", { path: "out/b-step-50" })).toMatchObject({ checkpoint: "b/step-50", folder: "out", form: "merged" });
    expect(panel().textContent).toContain("Written to out/b-step-50");
  });

  it("looks again every few seconds, and draws only what is new", async () => {
    const { model, answer, all, settle } = await shelf();
    const row = all(".xl-row")[0];
    await vi.advanceTimersByTimeAsync(4000);
    expect(await answer("tree", { mark: "m0" })).toMatchObject({ seen: "m0" });
    expect(all(".xl-row")[0]).toBe(row);
    await vi.advanceTimersByTimeAsync(4000);
    await vi.advanceTimersByTimeAsync(8000);
    expect(model.sent.filter((sent) => sent.kind === "tree").length).toBe(1); // one at a time
    await answer("tree", { error: "the folder is gone" });
    await settle();
    expect(all("[role='alert']")[0].textContent).toBe("✕ the folder is gone");
    expect(all(".xl-row").length).toBe(9);
  });

  it("keeps shortcuts from the notebook", async () => {
    const { all, find } = await shelf();
    const focusable = all("button, input, select, textarea, summary, [tabindex]");
    expect(focusable.length).toBeGreaterThan(30);
    for (const element of [find(".xl-root"), ...focusable]) expect(element.getAttribute("data-lm-suppress-shortcuts"), element.outerHTML).toBe("true");
  });

  it("leaves nothing behind", async () => {
    const { model, remove, stop } = await shelf();
    remove();
    stop();
    expect(model.listeners.get("msg:custom")).toEqual([]);
    expect(vi.getTimerCount()).toBe(0);
  });
});
