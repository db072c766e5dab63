// One panel per thing that can be done with a checkpoint.

import { h, number } from "./looks.js";
import { BASE, written } from "./lineage.js";
import { legend, pair } from "./sidebyside.js";
import { field, labelled, params, prompts, size, shown, working } from "./shelfwords.js";

/** Answers that stay on the page. */
const KEPT = 20;
const CONTROL = /Mac/.test(navigator.platform) ? "⌘" : "Ctrl";

/** A form with one button, and a line that says why it cannot be pressed or what goes on. */
class Panel {
  /**
   * @param {import("./shelfactions.js").Context} context
   * @param {string} verb  what the button says
   * @param {(HTMLElement | string)[]} parts
   */
  constructor(context, verb, parts) {
    this.context = context;
    /** @type {import("./lineage.js").Node | null} */
    this.node = null;
    this.reason = "";
    this.busy = false;
    this.button = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "xl-button xl-main" }, verb));
    this.note = h("p", { class: "xl-note-line", role: "status", "aria-live": "polite" });
    this.why = h("p", { class: "xl-why" });
    this.results = h("div", { class: "xl-results" });
    this.form = h("div", { class: "xl-form", role: "group", "aria-label": verb }, ...parts);
    this.foot = h("div", { class: "xl-foot" }, this.button, this.why, this.note);
    this.element = h("div", {}, this.form, this.foot, this.results);
    this.button.addEventListener("click", () => this.go());
    // JupyterLab swallows what would submit a form.
    this.form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.target.tagName === "BUTTON" || event.target.tagName === "SELECT") return;
      if (event.target.tagName === "TEXTAREA" && !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      event.stopPropagation();
      if (!this.button.disabled) this.go();
    });
  }

  /** @param {import("./lineage.js").Node | null} node @param {string} reason  why it cannot be done */
  aim(node, reason) {
    this.node = node;
    this.reason = reason;
    this.update();
  }

  update() {
    const reason = this.reason || this.missing();
    this.button.disabled = this.busy || Boolean(reason);
    this.why.textContent = this.busy ? "" : reason;
  }

  /** What the form lacks, in words. */
  missing() {
    return "";
  }

  go() {}

  /**
   * @param {string} doing
   * @param {Record<string, unknown>} content
   */
  async ask(doing, content) {
    // A button that loses its focus by being disabled gives it to the page.
    const focused = this.button === document.activeElement;
    this.busy = true;
    this.update();
    const answer = await working(this.note, doing, () => this.context.ask(content));
    this.busy = false;
    this.update();
    if (focused && !this.button.disabled && (document.activeElement === document.body || !document.activeElement)) this.button.focus();
    return answer;
  }

  /** @param {HTMLElement} result */
  keep(result) {
    this.results.prepend(result);
    while (this.results.children.length > KEPT) this.results.lastChild.remove();
  }
}

const area = (rows, placeholder) => /** @type {HTMLTextAreaElement} */ (field("textarea", { rows, placeholder, spellcheck: "false", class: "xl-area" }));
const line = (placeholder, more = "") => /** @type {HTMLInputElement} */ (field("input", { type: "text", placeholder, spellcheck: "false", autocomplete: "off", class: more }));
const close = (result) => {
  const button = h("button", { type: "button", class: "xl-close", title: "Remove this answer", "aria-label": "Remove this answer" }, "✕");
  button.addEventListener("click", () => result().remove());
  return button;
};

export class Sample extends Panel {
  constructor(context) {
    const prompt = area(3, "A prompt");
    const how = params({ n: ["completions", "2"], max_tokens: ["tokens at most", "64"], temperature: ["temperature", "1"], seed: ["seed", "0"] });
    super(context, "Sample", [labelled("Prompt", prompt, "xl-wide"), h("div", { class: "xl-line-of" }, ...how.elements)]);
    this._prompt = prompt;
    this._how = how;
    this.button.title = `${CONTROL}+Enter in the prompt`;
    prompt.addEventListener("input", () => this.update());
  }

  missing() {
    return this._prompt.value ? "" : "Write a prompt.";
  }

  async go() {
    const { name } = this.node;
    const prompt = this._prompt.value;
    const given = this._how.read();
    const answer = await this.ask(`Sampling from ${shown(name)}`, { kind: "sample", checkpoint: name, prompt, params: given });
    if (!answer) return;
    this.note.textContent = `${answer.samples.length} completion${answer.samples.length === 1 ? "" : "s"} in ${answer.seconds.toFixed(1)} s`;
    const completions = answer.samples.map(({ text, tokens, stop, logprob }) => {
      const end = { stop: "", length: "cut off, ", abort: "given up, " }[stop] ?? `${stop}, `;
      const about = `${end}${tokens} token${tokens === 1 ? "" : "s"}${logprob === null ? "" : `, ${number(logprob)} nats`}`;
      return h("li", {}, h("span", { class: "xl-text" }, shown(text) || "∅"), h("span", { class: "xl-muted" }, about));
    });
    const how = `temperature ${given.temperature || "default"}, seed ${given.seed || "default"}`;
    const result = h("article", { class: "xl-result" }, h("header", {}, h("strong", {}, shown(name)), h("span", { class: "xl-muted" }, how), h("span", { class: "xl-fill" }), close(() => result)), h("p", { class: "xl-prompt" }, shown(prompt)), h("ol", { class: "xl-samples" }, ...completions));
    this.keep(result);
  }
}

export class Compare extends Panel {
  constructor(context) {
    const other = /** @type {HTMLSelectElement} */ (field("select", { class: "xl-select", "aria-label": "B, what it is compared with" }));
    const asked = area(3, "Prompts: one per line, or with empty lines between them");
    const how = params({ max_tokens: ["tokens at most", "64"], temperature: ["temperature", "0"], seed: ["seed", "0"] });
    const left = h("output", { class: "xl-left-name" });
    const swap = h("button", { type: "button", class: "xl-button", title: "Select the other one, and compare it with this one" }, "⇄ Swap");
    const pick = h("div", { class: "xl-line-of xl-pick" }, h("span", {}, h("span", { class: "xl-badge" }, "A"), " ", left), labelled("B", other, "xl-with"), swap);
    super(context, "Compare", [pick, labelled("Prompts", asked, "xl-wide"), h("div", { class: "xl-line-of" }, ...how.elements)]);
    Object.assign(this, { _other: other, _asked: asked, _how: how, _left: left, _wanted: BASE });
    this.button.title = `${CONTROL}+Enter in the prompts`;
    asked.addEventListener("input", () => this.update());
    other.addEventListener("change", () => this.against(other.value));
    swap.addEventListener("click", () => {
      const [a, b] = [this.node?.name, this._wanted];
      if (!a || a === b) return;
      this.against(a);
      context.select(b);
    });
  }

  aim(node, reason) {
    this._left.textContent = node && !reason ? shown(node.name) : "–";
    const names = this.context.lineage().names();
    if (this._names?.join("\n") !== names.join("\n")) {
      this._names = names;
      this._other.replaceChildren(...names.map((name) => h("option", { value: name }, shown(name))));
    }
    if (!names.includes(this._wanted)) this._wanted = BASE;
    this._other.value = this._wanted;
    super.aim(node, reason);
  }

  /** @param {string} name */
  against(name) {
    this._wanted = name;
    this._other.value = name;
    this.context.other(name);
    this.update();
  }

  missing() {
    if (this.node?.name === this._wanted) return "Choose another one as B: this compares a checkpoint with itself.";
    return prompts(this._asked.value).length ? "" : "Write a prompt.";
  }

  async go() {
    const names = { left: this.node.name, right: this._wanted };
    const asked = prompts(this._asked.value);
    const many = `${asked.length} prompt${asked.length === 1 ? "" : "s"}`;
    const answer = await this.ask(`Comparing ${shown(names.left)} with ${shown(names.right)} on ${many}`, { kind: "compare", ...names, prompts: asked, params: this._how.read() });
    if (!answer) return;
    const apart = answer.results.filter((r) => r.divergence !== null).length;
    this.note.textContent = `${apart} of ${many} answered differently, ${answer.seconds.toFixed(1)} s`;
    this.results.replaceChildren(legend(shown(names.left), shown(names.right)), ...answer.results.map((result) => pair(result, names)));
  }
}

export class Branch extends Panel {
  constructor(context) {
    const fields = { learning_rate: line("as before"), steps: line("as before") };
    const lines = area(2, "name=value, one per line");
    super(context, "Start a run from here", [h("div", { class: "xl-line-of" }, labelled("learning rate", fields.learning_rate), labelled("steps", fields.steps)), labelled("Other settings", lines, "xl-wide")]);
    this._fields = fields;
    this._lines = lines;
  }

  aim(node, reason) {
    const settings = this.context.lineage().settings(node?.checkpoint ?? null);
    for (const [name, input] of Object.entries(this._fields)) input.placeholder = settings[name] === undefined || settings[name] === null ? "as before" : `${written(settings[name])}, as before`;
    super.aim(node, reason);
  }

  async go() {
    const { name } = this.node;
    const fields = Object.fromEntries(Object.entries(this._fields).map(([setting, input]) => [setting, input.value]));
    const answer = await this.ask(`Starting a run from ${shown(name)}`, { kind: "branch", checkpoint: name, fields, lines: this._lines.value });
    if (!answer) return;
    this.note.replaceChildren(h("span", {}, "✓ Run ", h("strong", {}, shown(answer.run)), ` goes on from ${shown(name)}. To watch it: `, h("code", {}, `lab.run(${JSON.stringify(shown(answer.run))})`)));
    this.context.changed();
  }
}

export class Load extends Panel {
  constructor(context) {
    super(context, "Load", [h("p", { class: "xl-muted" }, "Makes a training client of it, to go on with in a loop of your own. How to get at it is said here once it is loaded.")]);
  }

  async go() {
    const { name } = this.node;
    const answer = await this.ask(`Loading ${shown(name)}`, { kind: "load", checkpoint: name });
    if (answer) this.note.textContent = `✓ ${shown(answer.said)}`;
  }
}

let forms = 0;

export class Export extends Panel {
  constructor(context) {
    forms += 1;
    const choice = (value, text, hint) => {
      const input = /** @type {HTMLInputElement} */ (h("input", { type: "radio", name: `xl-form-${forms}`, value }));
      input.checked = value === "peft";
      return { input, element: h("label", { class: "xl-choice", title: hint }, input, ` ${text}`) };
    };
    const choices = [choice("peft", "PEFT adapter (small; needs the base model)", "adapter_model.safetensors and adapter_config.json"), choice("merged", "merged Hugging Face model (whole)", "model.safetensors and config.json: the base model with the adapter added")];
    const folder = line("folder, such as exported");
    super(context, "Export", [h("div", { class: "xl-line-of", role: "radiogroup", "aria-label": "Form" }, ...choices.map((c) => c.element)), labelled("Folder", folder, "xl-wide")]);
    this._choices = choices;
    this._folder = folder;
    folder.addEventListener("input", () => this.update());
  }

  missing() {
    return this._folder.value.trim() ? "" : "Write a folder.";
  }

  async go() {
    const { name } = this.node;
    const form = this._choices.find((c) => c.input.checked).input.value;
    const answer = await this.ask(`Exporting ${shown(name)}`, { kind: "export", checkpoint: name, folder: this._folder.value.trim(), form });
    if (answer) this.note.replaceChildren(h("span", {}, "✓ Written to ", h("code", {}, shown(answer.path))));
  }
}

export class Delete extends Panel {
  constructor(context) {
    const lost = h("p", {});
    super(context, "Delete …", [lost]);
    this._lost = lost;
    this._sure = h("p", {});
    this._cancel = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "xl-button" }, "Cancel"));
    const yes = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "xl-button xl-danger" }, "Delete it"));
    this._ask = h("div", { class: "xl-confirm", role: "alertdialog", "aria-label": "Delete the checkpoint?" }, this._sure, h("div", { class: "xl-line-of" }, this._cancel, yes));
    this._ask.hidden = true;
    this.foot.after(this._ask);
    this._cancel.addEventListener("click", () => this._drop(true));
    this._ask.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      this._drop(true);
    });
    yes.addEventListener("click", () => this._really());
  }

  aim(node, reason) {
    if (node?.name !== this.node?.name || reason) this._drop(false);
    const many = node?.checkpoint ? this.context.lineage().branches(node).length : 0;
    const stay = many ? ` The ${many === 1 ? "run" : `${many} runs`} that ${many === 1 ? "was" : "were"} branched off it ${many === 1 ? "stays" : "stay"}.` : "";
    this._lost.textContent = node?.checkpoint && !reason ? `Frees ${size(node.checkpoint.megabytes * 1e6)}. What is recorded of its run stays, and so do its other checkpoints.${stay}` : "";
    super.aim(node, reason);
  }

  go() {
    this._target = this.node.name;
    const { step, megabytes } = this.node.checkpoint;
    const at = step === null ? "" : `, step ${step}`;
    this._sure.replaceChildren("Delete ", h("strong", {}, shown(this._target)), ` (${size(megabytes * 1e6)}${at}) from the disk? It cannot be had back: neither sampling nor training from it will be possible.`);
    this._ask.hidden = false;
    this.button.hidden = true;
    this.note.textContent = "";
    this._cancel.focus();
  }

  _drop(back) {
    if (this._ask.hidden) return;
    this._ask.hidden = true;
    this.button.hidden = false;
    if (back) this.button.focus();
  }

  async _really() {
    const name = this._target;
    this._drop(true);
    const answer = await this.ask(`Deleting ${shown(name)}`, { kind: "delete", checkpoint: name });
    if (!answer) return;
    this.note.textContent = `✓ ${shown(name)} was deleted.`;
    this.context.changed();
  }
}
