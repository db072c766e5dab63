// The controls' module.  It alone speaks to the kernel: see xorl_lab/widgets/controls.py.

import { openChannel } from "./channel.js";
import { hubOf } from "./hub.js";
import { h, number, stateOf } from "./looks.js";
import style from "./style.css";

const PATIENCE = 4000;
const ACTIONS = [
  { kind: "pause", text: "Pause", glyph: "‖", title: "Halt before the next step", when: ["running"] },
  { kind: "resume", text: "Resume", glyph: "▶", title: "Go on", when: ["paused"] },
  { kind: "step", text: "Step", glyph: "▶|", title: "Run one more step, then pause", when: ["running", "paused"] },
  { kind: "stop", text: "Stop", glyph: "■", title: "End the run; what is finished is kept and saved", when: ["running", "paused"] },
];
const DEAF = "The kernel does not answer while a cell runs. To stop the run, interrupt the kernel: the ■ button above, or the keys I, I outside of a cell.";

export default () => {
  /** @type {{status: any, knobs: Record<string, number | null> | null} | null} */
  let state = null;
  let deaf = false;
  /** @type {Set<() => void>} */
  const views = new Set();
  /** @type {(content: Record<string, unknown>) => Promise<{content: any, buffers: DataView[]}>} */
  let ask;
  const draw = () => views.forEach((view) => view());

  function initialize({ model }) {
    const hub = hubOf(model.get("group"));
    const channel = openChannel(model, {
      greeted: (answer) => hub.tell("heads", answer.heads ?? []),
      deafened: (value) => {
        deaf = value;
        draw();
      },
    });
    ask = channel.ask;
    hub.connect(ask);
    const stop = hub.on("state", (value) => {
      state = value;
      draw();
    });
    state = hub.state ?? { status: null, knobs: model.get("knobs") };
    return () => {
      stop();
      channel.close();
      hub.connect(null);
    };
  }

  function render({ model, el }) {
    const reason = model.get("reason");
    const root = h("div", { class: "xl-root xl-controls", "data-lm-suppress-shortcuts": "true", role: "toolbar", "aria-label": "Controls of the run" });
    el.append(h("style", {}, style), root);
    const note = h("p", { class: "xl-reason", role: "status", "aria-live": "polite" });
    let said = "";
    const act = async (content) => {
      said = "";
      const timer = setTimeout(() => {
        deaf = true;
        update();
      }, PATIENCE);
      const answer = await ask(content);
      clearTimeout(timer);
      said = answer.content.error ?? "";
      update();
    };
    const buttons = ACTIONS.map((action) => {
      const button = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: `xl-button xl-${action.kind}`, title: action.title }, h("span", { class: "xl-icon", "aria-hidden": "true" }, action.glyph), ` ${action.text}`));
      button.addEventListener("click", () => act({ kind: action.kind }));
      return { action, button };
    });
    const fields = new Map();
    const knobBox = h("div", { class: "xl-knobs" });
    root.append(h("div", { class: "xl-buttons" }, ...buttons.map((b) => b.button)), knobBox, note);

    function update() {
      const now = state?.status?.state;
      const over = now !== undefined && stateOf(now).final;
      for (const { action, button } of buttons) button.disabled = Boolean(reason) || (now !== undefined && !action.when.includes(now));
      const knobs = state?.knobs && Object.keys(state.knobs).length ? state.knobs : model.get("knobs");
      for (const [name, value] of Object.entries(knobs ?? {})) {
        if (!fields.has(name)) {
          fields.set(name, new Knob(name, act));
          knobBox.append(fields.get(name).element);
        }
        fields.get(name).show(value, Boolean(reason) || over);
      }
      note.textContent = reason || (over ? `The run has ended: ${stateOf(now).text}.` : said || (deaf ? DEAF : ""));
      note.classList.toggle("xl-bad", Boolean(said) && !reason && !over);
    }
    views.add(update);
    update();
    return () => views.delete(update);
  }

  return { initialize, render };
};

/** A number that can be changed while the run goes on. */
class Knob {
  /**
   * @param {string} name
   * @param {(content: Record<string, unknown>) => void} act
   */
  constructor(name, act) {
    const text = name.replaceAll("_", " ");
    this._field = /** @type {HTMLInputElement} */ (h("input", { type: "text", inputmode: "decimal", size: 8, spellcheck: "false", autocomplete: "off", "aria-label": text }));
    this._set = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", class: "xl-button", title: `Use this ${text} from the next step on` }, "Set"));
    this.element = h("form", { class: "xl-knob" }, h("label", {}, h("span", {}, text), this._field), this._set);
    this._value = NaN;
    this._off = false;
    this._field.addEventListener("input", () => this._check());
    this._field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this._field.value = written(this._value);
      else if (event.key === "Enter") apply(event); // JupyterLab swallows what would submit a form
      else return;
      event.stopPropagation();
      this._check();
    });
    const apply = (event) => {
      event.preventDefault();
      if (!this._set.disabled) act({ kind: "set", name, value: read(this._field.value) });
    };
    this.element.addEventListener("submit", apply);
  }

  /** @param {number | null} value @param {boolean} off */
  show(value, off) {
    this._off = off;
    this._field.disabled = off;
    const untouched = this._field.value === written(this._value) || read(this._field.value) === value || this._field.value === "";
    if (value !== this._value && untouched) this._field.value = written(value);
    this._value = value ?? NaN;
    this._field.title = `now ${number(value)}`;
    this._check();
  }

  _check() {
    const value = read(this._field.value);
    const wrong = !Number.isFinite(value);
    this._field.setAttribute("aria-invalid", String(wrong && this._field.value !== ""));
    this._set.disabled = this._off || wrong || value === this._value;
  }
}

/** @param {string} text */
function read(text) {
  return text.trim() === "" ? NaN : Number(text.trim().replace(",", "."));
}

/**
 * A number as one types it: 0.0001 is 1e-4.
 * @param {number | null} value
 */
function written(value) {
  if (value === null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential().replace("e+", "e");
  return String(value);
}
