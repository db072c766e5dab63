// What can be done with the selected checkpoint: tabs, of which each says why if it cannot be.

import { details } from "./shelfdetails.js";
import { Branch, Compare, Delete, Export, Load, Sample } from "./shelfdeeds.js";
import { h } from "./looks.js";
import { BASE, resumable } from "./lineage.js";
import { shown } from "./shelfwords.js";

/**
 * @typedef {import("./lineage.js").Node} Node
 * @typedef {{ask: (content: Record<string, unknown>) => Promise<{content: any}>, changed: () => void, select: (name: string) => void, lineage: () => import("./lineage.js").Lineage, other: (name: string) => void}} Context
 */

const TABS = [
  { kind: "details", text: "Details" },
  { kind: "sample", text: "Sample", make: Sample },
  { kind: "compare", text: "Compare", make: Compare },
  { kind: "branch", text: "Branch", make: Branch },
  { kind: "load", text: "Load", make: Load },
  { kind: "export", text: "Export", make: Export },
  { kind: "delete", text: "Delete", make: Delete },
];
const NOT_BASE = {
  branch: "No run led to the base model: begin one with lab.grpo(…) or lab.sft(…).",
  export: "The base model is no checkpoint: export one that was trained.",
  delete: "The base model is no checkpoint: it cannot be deleted.",
};
let count = 0;

/**
 * Why something cannot be done with a row; empty if it can.
 * @param {string} kind
 * @param {Node | null} node
 */
export function why(kind, node) {
  if (kind === "details") return "";
  if (!node) return "Select a checkpoint.";
  if (node.kind === "run") return "This is a run: select one of its checkpoints.";
  if (node.kind === "gone") return "This checkpoint was deleted.";
  if (node.name === BASE) return NOT_BASE[kind] ?? "";
  const { held } = node.checkpoint;
  if (kind === "delete" && held) return `It cannot be deleted now: ${held}`;
  if ((kind === "branch" || kind === "load") && !resumable(node.checkpoint)) {
    return "It was saved for sampling only, without the state of the optimizer: training cannot go on from it.";
  }
  return "";
}

export class Actions {
  /** @param {Context} context @param {() => void} leave  back to the tree */
  constructor(context, leave) {
    count += 1;
    this._context = context;
    this._id = `xl-actions-${count}`;
    this._at = "details";
    /** @type {Node | null} */
    this._node = null;
    this._title = h("h4", { class: "xl-chosen" });
    this._facts = h("div", { class: "xl-details" });
    this._tabs = TABS.map(({ kind, text, make }) => {
      const panel = make ? new make(context) : { element: this._facts, aim: () => {} };
      const button = h("button", { type: "button", role: "tab", id: `${this._id}-${kind}`, "aria-controls": `${this._id}-${kind}-panel`, class: "xl-tab" }, text);
      const holder = h("div", { role: "tabpanel", id: `${this._id}-${kind}-panel`, "aria-labelledby": `${this._id}-${kind}`, class: "xl-panelbody", tabindex: kind === "details" ? 0 : null }, panel.element);
      button.addEventListener("click", () => this.open(kind));
      return { kind, button, holder, panel };
    });
    const list = h("div", { role: "tablist", class: "xl-tabs", "aria-label": "What to do with the selected row" }, ...this._tabs.map((tab) => tab.button));
    list.addEventListener("keydown", (event) => this._pressed(event));
    this.element = h("section", { class: "xl-actions", "aria-label": "Selected" }, this._title, list, ...this._tabs.map((tab) => tab.holder));
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      leave();
    });
    this.open("details");
  }

  /** @param {Node | null} node @param {number} now */
  show(node, now) {
    this._node = node;
    const what = node?.kind === "run" ? "Run " : "";
    this._title.textContent = node ? what + shown(node.name) : "Nothing is selected";
    this._facts.replaceChildren(...(node ? details(this._context.lineage(), node, now) : [h("p", {}, "Select a row above.")]));
    for (const { kind, button, panel } of this._tabs) {
      const reason = why(kind, node);
      button.classList.toggle("xl-dim", Boolean(reason));
      button.title = reason;
      panel.aim(node, reason);
    }
  }

  /** @param {string} kind */
  open(kind) {
    this._at = kind;
    for (const tab of this._tabs) {
      const on = tab.kind === kind;
      tab.button.setAttribute("aria-selected", String(on));
      tab.button.tabIndex = on ? 0 : -1;
      tab.holder.hidden = !on;
    }
  }

  /** Choose what the selected one is compared with. @param {Node} node */
  against(node) {
    this.open("compare");
    this._tab("compare").panel.against(node.name);
  }

  focus() {
    this._tab(this._at).button.focus();
  }

  _tab(kind) {
    return this._tabs.find((tab) => tab.kind === kind);
  }

  _pressed(event) {
    const at = this._tabs.findIndex((tab) => tab.kind === this._at);
    const last = this._tabs.length - 1;
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.open(this._tabs[to].kind);
    this.focus();
  }
}
