import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Desk } from "../src/desk.js";
import { h } from "../src/looks.js";
import { UNITS, kernel, packed, rollout, spelled } from "./kernel.js";
import { fakeLayout, frame } from "./support.js";

const SETUP = { runs: [{ name: "a run", kind: "grpo", model: "tiny" }], reason: "" };
const cleanups = [];

async function settle() {
  for (let i = 0; i < 4; i += 1) await frame();
}

async function inspector(state = kernel(), setup = SETUP) {
  const root = h("div", { class: "xl-root xl-inspector" });
  document.body.replaceChildren(root);
  const desk = new Desk(root, setup, state.ask);
  cleanups.push(() => desk.destroy());
  await settle();
  return { desk, root, state, find: (s) => root.querySelector(s), all: (s) => [...root.querySelectorAll(s)], asked: (kind) => state.asked.filter((c) => c.kind === kind) };
}

const key = (target, name, more = {}) => target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true, ...more }));
const type = (element, value) => {
  element.value = value;
  element.dispatchEvent(new Event("input", { bubbles: true }));
};
const pause = (ms) => new Promise((go) => setTimeout(go, ms));

afterEach(() => cleanups.splice(0).forEach((clean) => clean()));
beforeEach(() => {
  fakeLayout();
  Object.defineProperty(HTMLElement.prototype, "clientHeight", { configurable: true, get: () => 260 });
});

describe("the table", () => {
  it("holds only the rows in view, and asks for their page alone", async () => {
    const { all, asked, find } = await inspector(kernel(100_000));
    expect(all(".xl-tr").length).toBeLessThan(40);
    expect(find(".xl-table").getAttribute("aria-rowcount")).toBe("100001");
    expect(asked("page").map((c) => c.start)).toEqual([0]);
    expect(find(".xl-desk-head").textContent).toContain("100,000 rollouts");
    expect(find(".xl-tr").textContent).toContain("text 0 <script>");
    expect(find("script")).toBe(null);
    expect(all(".xl-failed").length).toBe(1);
  });

  it("asks for what is scrolled to, not for what was passed", async () => {
    const { find, asked } = await inspector(kernel(100_000));
    const table = find(".xl-table");
    // Without a pause: how long one takes is the machine's business.
    for (const row of [3000, 9000, 50_000]) {
      table.scrollTop = row * 26;
      table.dispatchEvent(new Event("scroll"));
    }
    await settle();
    await pause(120);
    await settle();
    expect(asked("page").map((c) => c.start)).toEqual([0, 49_900, 50_000]);
    expect(find(".xl-tr").textContent).toContain("text 49992 <script>");
  });

  it("sorts by the header, down, up and not at all", async () => {
    const { all, asked } = await inspector();
    const head = () => all(".xl-th").find((e) => e.textContent.startsWith("reward"));
    const sorted = [];
    for (let i = 0; i < 3; i += 1) {
      head().querySelector("button").click();
      await settle();
      sorted.push(head().getAttribute("aria-sort"));
    }
    expect(sorted).toEqual(["descending", "ascending", "none"]);
    expect(asked("query").map((c) => [c.order_by, c.descending])).toEqual([["id", true], ["reward", true], ["reward", false], ["id", true]]);
  });

  it("filters once typing has paused", async () => {
    const { find, asked } = await inspector();
    type(find(".xl-search"), "an");
    type(find(".xl-search"), "answer");
    type(find("[aria-label='least reward']"), "0,5");
    type(find("[aria-label='last step']"), "20");
    type(find(".xl-filters .xl-tags-field"), "hack odd");
    await pause(350);
    await settle();
    expect(asked("query").length).toBe(2);
    expect(asked("query")[1].search).toBe("answer");
    expect(asked("query")[1].where).toEqual([["step", "<=", 20], ["reward", ">=", 0.5], ["tags", "has", "hack"], ["tags", "has", "odd"]]);
    type(find("[aria-label='least reward']"), "x");
    expect(find(".xl-filters button").disabled).toBe(false);
    await pause(350);
    expect(find("[aria-label='least reward']").getAttribute("aria-invalid")).toBe("true");
    find(".xl-filters button").click();
    await settle();
    expect(asked("query").at(-1).where).toEqual([]);
  });

  it("says what is wrong", async () => {
    const state = kernel();
    state.answers.query = () => ({ content: { error: "there is no scalar <b>" }, buffers: [] });
    const { find } = await inspector(state);
    expect(find(".xl-bad").textContent).toBe("there is no scalar <b>");
  });

  it("shows that rollouts came, and takes them in by itself at the top alone", async () => {
    const { desk, state, find, asked } = await inspector();
    find(".xl-table").focus();
    state.count = 1037;
    state.version = 2;
    await desk._poll();
    expect(find(".xl-news").hidden).toBe(false);
    expect(find(".xl-news").textContent).toBe("37 new");
    expect(asked("query").length).toBe(1);
    find(".xl-news").click();
    await settle();
    expect(find(".xl-news").hidden).toBe(true);
    document.activeElement.blur();
    state.count = 1040;
    await desk._poll();
    await settle();
    expect(asked("query").length).toBe(3);
    expect(find(".xl-desk-head").textContent).toContain("1,040 rollouts");
  });

  it("is worked with the keyboard alone", async () => {
    const { find, all } = await inspector();
    const table = find(".xl-table");
    table.focus();
    for (const name of ["ArrowDown", "ArrowDown", "ArrowUp", "End", "Home", "PageDown"]) key(table, name);
    const active = find(".xl-tr.xl-active");
    expect(table.getAttribute("aria-activedescendant")).toBe(active.id);
    expect(active.dataset.line).toBe("8");
    key(table, "Enter");
    await settle();
    expect(find(".xl-reading").hidden).toBe(false);
    expect(find(".xl-tr.xl-open").dataset.id).toBe("9");
    key(table, "ArrowDown");
    key(table, "c");
    await settle();
    expect(all(".xl-column").length).toBe(2);
    expect(find(".xl-status").textContent).toBe("Both are the same, token for token.");
  });
});

describe("a rollout", () => {
  async function opened(state = kernel(), setup = SETUP) {
    const all = await inspector(state, setup);
    await all.desk.open({ run: 0, id: 1 });
    await settle();
    const flow = all.find(".xl-column > .xl-flow");
    return { ...all, flow, spans: () => [...flow.querySelectorAll(".xl-t")] };
  }

  it("is a flow of units, each shown as text", async () => {
    const { spans, find } = await opened();
    expect(spans().map((s) => s.textContent)).toEqual(["The", " sum", " is", "😀", "↵\n", "▯", "<b>", "◆"]);
    expect(find(".xl-flow b")).toBe(null);
    expect(find(".xl-flow script")).toBe(null);
    expect(spans().at(-1).classList.contains("xl-special")).toBe(true);
    expect(find(".xl-facts").textContent).toContain("<u> 0.250");
    expect(find(".xl-row-of").textContent).toContain("<i>7</i>");
  });

  it("shows on a switch what cannot be seen", async () => {
    const { spans, find } = await opened();
    const box = find(".xl-reading-tools input");
    box.click();
    expect(spans().map((s) => s.textContent)).toEqual(["The", "␣sum", "␣is", "😀", "⏎\n", "⟨U+202E⟩", "<b>", "<|end|>"]);
  });

  it("is coloured by what is chosen, tokens without value apart", async () => {
    const { spans, flow, find } = await opened();
    const colours = () => spans().map((s) => s.className.match(/xl-([sd]-?\d|void)/)[1]);
    expect(colours()).toEqual(["s0", "s1", "s2", "s4", "s5", "s6", "s7", "s8"]);
    key(flow, "5");
    expect(colours()[2]).toBe("void");
    expect(colours()[0]).toMatch(/^s[1-8]$/);
    expect(find(".xl-key-row").textContent).toContain("no value");
    key(flow, "4");
    expect(new Set(colours())).toEqual(new Set(["d-6", "d6"]));
    key(flow, "6");
    expect(new Set(colours())).toEqual(new Set(["void"]));
    expect(find(".xl-key-row").textContent).toContain("no token has this value");
    expect(find(".xl-reading .xl-segment[aria-checked='true']").textContent).toBe("entropy");
  });

  it("marks tokens by a second cue, and finds them by keyboard", async () => {
    const { spans, flow, find } = await opened();
    expect(spans().map((s) => ["xl-clipped", "xl-masked", "xl-cut"].filter((c) => s.classList.contains(c)))[1]).toEqual(["xl-clipped"]);
    expect(find(".xl-key-row").textContent).toMatch(/clipped.*masked.*weight cut/);
    flow.focus();
    key(flow, "n");
    expect(find(".xl-token").dataset.token).toBe("1");
    key(flow, "n");
    expect(find(".xl-token").dataset.token).toBe("5");
    expect(find(".xl-marks-of").textContent).toContain("left out of the loss");
    key(flow, "p");
    expect(find(".xl-token").dataset.token).toBe("1");
  });

  it("tells everything of a token, of all that make one character", async () => {
    const { flow, find, all } = await opened();
    flow.focus();
    for (let i = 0; i < 3; i += 1) key(flow, "ArrowRight");
    const cards = all(".xl-token");
    expect(cards.map((c) => c.dataset.id)).toEqual(["103", "104"]);
    expect(cards[0].querySelector(".xl-piece").textContent).toBe("b'\\xf0\\x9f'");
    expect(find(".xl-together").textContent).toContain("2 tokens make 😀");
    expect(Number(cards[0].querySelector("[data-measure='logprob']").dataset.value)).toBe(-1.5);
    expect(Number(cards[0].querySelector("[data-measure='gap']").dataset.value)).toBeCloseTo(0.1, 6);
    expect(cards[0].querySelector(".xl-drawn").dataset.id).toBe("103");
    expect(cards[0].querySelector(".xl-alternatives").textContent).toContain("the most likely");
    expect(flow.getAttribute("aria-activedescendant")).toBe(find(".xl-on").id);
    key(flow, "End");
    expect(find(".xl-token").dataset.id).toBe("108");
    expect(find(".xl-token .xl-alternatives").textContent).toContain("number 2");
  });

  it("keeps tags and notes", async () => {
    const { find, asked } = await opened();
    const tags = find(".xl-notes .xl-tags-field");
    expect(tags.value).toBe("a");
    tags.value = "a, hack";
    tags.dispatchEvent(new Event("change"));
    await settle();
    expect(asked("annotate")).toEqual([{ kind: "annotate", run: 0, rollout: 1, tags: ["a", "hack"], note: "" }]);
    expect(find(".xl-notes").textContent).toContain("saved");
  });

  it("hands over a Datum where the clipboard is closed", async () => {
    vi.stubGlobal("navigator", { clipboard: { writeText: async () => Promise.reject(new Error("no")) } });
    const { all, find } = await opened();
    all("button").find((b) => b.textContent === "Copy as Datum").click();
    await settle();
    expect(find(".xl-source").value).toBe("datum = 1");
    vi.unstubAllGlobals();
  });

  it("is drawn anew from a token, beside the original", async () => {
    const state = kernel();
    const { heads, buffers } = packed([...spelled([[" is"], [" not"]]).map(([n, t, v]) => (n === "tokens" ? [n, t, [102, 55]] : [n, t, v])), ["value:logprobs", "f4", [-0.1, -2]]]);
    state.answers.resample = () => ({ content: { drawn: [{ first: 0, arrays: heads, special: [], alternatives: 0, stop_reason: "length" }] }, buffers });
    const { flow, all, find, asked } = await opened(state);
    flow.focus();
    key(flow, "ArrowRight");
    key(flow, "ArrowRight");
    key(flow, "r");
    await settle();
    expect(find(".xl-from").textContent).toContain("token 3");
    find(".xl-resample-form").dispatchEvent(new Event("submit", { cancelable: true }));
    await settle();
    expect(asked("resample")[0]).toMatchObject({ rollout: 1, position: 2, weights: "base", params: { n: 2, temperature: 1, max_tokens: 64, seed: 0 } });
    const [original, drawn] = all(".xl-branch");
    expect([...original.querySelectorAll(".xl-t")].map((s) => s.textContent).slice(0, 2)).toEqual([" is", "😀"]);
    expect([...drawn.querySelectorAll(".xl-t")].map((s) => [s.textContent, s.classList.contains("xl-shared"), s.classList.contains("xl-fork")])).toEqual([[" is", true, false], [" not", false, true]]);
    state.answers.resample = () => ({ content: { error: "it was <b>deleted</b>" }, buffers: [] });
    find(".xl-resample-form").dispatchEvent(new Event("submit", { cancelable: true }));
    await settle();
    expect(find(".xl-resample .xl-bad").textContent).toBe("it was <b>deleted</b>");
  });

  it("tells what an environment wrote, which has no values and is not drawn anew", async () => {
    const state = kernel();
    const { heads, buffers } = packed([
      ...spelled([["What"]], "prompt_"),
      ...spelled([["calc"], ["= 2"], ["A"]]),
      ["value:logprobs", "f4", [-1, NaN, -2]],
      ["value:weights", "f4", [1, 0, 1]],
    ]);
    state.answers.rollout = () => ({ content: { ...rollout(1).content, arrays: heads, alternatives: 0 }, buffers });
    const { spans, flow, find } = await opened(state);
    expect(spans().map((s) => s.classList.contains("xl-read"))).toEqual([false, true, false]);
    expect(spans()[1].className).not.toMatch(/xl-(void|[sd]-?\d)/);
    expect(find(".xl-facts").textContent).toMatch(/tokens 2.*turns 2/);
    expect(find(".xl-key-row").textContent).toContain("from the environment");
    expect(find(".xl-key-row").textContent).not.toContain("no value");
    flow.focus();
    expect(find(".xl-detail-foot button").disabled).toBe(false);
    key(flow, "ArrowRight");
    expect(find(".xl-token .xl-chip").textContent).toBe("environment");
    expect(find(".xl-token .xl-values")).toBe(null);
    expect(find(".xl-detail-foot button").disabled).toBe(true);
    key(flow, "r");
    await settle();
    expect(find(".xl-resample").hidden).toBe(true);
  });

  it("says why nothing can be drawn", async () => {
    const { flow, all, find } = await opened(kernel(), { ...SETUP, reason: "No model is at hand." });
    flow.focus();
    key(flow, "r");
    await settle();
    expect(find(".xl-resample").hidden).toBe(true);
    const button = all("button").find((b) => b.textContent === "Resample from here");
    expect(button.disabled).toBe(true);
    expect(button.title).toBe("No model is at hand.");
  });

  it("opens another one on the same prompt", async () => {
    const { all, find, asked } = await opened();
    all("button").find((b) => b.textContent === "Same prompt").click();
    await settle();
    expect(all(".xl-kin-dot").length).toBe(5);
    expect(find(".xl-kin-dot.xl-own").dataset.id).toBe("1");
    all(".xl-kin-dot")[3].click();
    await settle();
    expect(asked("rollout").at(-1).rollout).toBe(4);
    expect(UNITS.length).toBe(8);
    expect(rollout(1).content.facts.id).toBe(1);
  });
});
