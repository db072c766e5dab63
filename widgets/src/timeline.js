// How far a run is, with what happened on the way.

import { ROUTINE } from "./data.js";
import { h, kindOf } from "./looks.js";

/** Marks nearer to each other than this share of the width become one; the second where many are. */
const NEAR = [0.018, 0.05];
const MANY = 25;

export class Timeline {
  /** @param {(step: number | null) => void} look called with the step of a mark that is looked at */
  constructor(look) {
    this._look = look;
    this._fill = h("div", { class: "xl-done" });
    this._marks = h("div", { class: "xl-marks", role: "list", "aria-label": "Events" });
    this._bar = h("div", { class: "xl-bar", role: "progressbar", "aria-label": "Steps", "aria-valuemin": 0 }, this._fill);
    this._note = h("div", { class: "xl-note", role: "tooltip" });
    this.element = h("div", { class: "xl-timeline" }, this._bar, this._marks, this._note);
    this._drawn = "";
  }

  /** @param {import("./data.js").Run} run */
  draw(run) {
    const { step, total } = run.status;
    const end = Math.max(total ?? 0, step, 1);
    this._fill.style.width = `${(100 * step) / end}%`;
    this._bar.setAttribute("aria-valuenow", String(step));
    this._bar.setAttribute("aria-valuemax", String(end));
    this._bar.setAttribute("aria-valuetext", total ? `step ${step} of ${total}` : `step ${step}`);
    const groups = grouped(run.marks, end);
    const drawn = JSON.stringify(groups);
    if (drawn === this._drawn) return;
    this._drawn = drawn;
    const focused = [...this._marks.children].indexOf(document.activeElement?.parentElement);
    this._marks.replaceChildren(...groups.map((group) => this._mark(group)));
    if (focused >= 0) /** @type {HTMLElement | undefined} */ (this._marks.children[focused]?.firstChild)?.focus();
  }

  /** @param {{step: number, place: number, kind: string, texts: string[]}} group */
  _mark({ step, place, kind, texts }) {
    const text = texts.join("\n");
    const button = h("button", { type: "button", class: `xl-mark xl-of-${kind}`, "aria-label": text, style: `left:${(100 * place).toFixed(2)}%` }, kindOf(kind).glyph);
    const say = () => {
      this._note.textContent = text;
      this._note.style.left = `${Math.min(72, Math.max(0, 100 * place - 8)).toFixed(1)}%`;
      this._note.classList.add("xl-on");
      this._look(step);
    };
    const hush = () => {
      this._note.classList.remove("xl-on");
      this._look(null);
    };
    button.addEventListener("mouseenter", say);
    button.addEventListener("focus", say);
    button.addEventListener("mouseleave", hush);
    button.addEventListener("blur", hush);
    return h("span", { role: "listitem" }, button);
  }
}

/** Of a mark that stands for several: the gravest is shown, and told of first. */
const WEIGHT = { error: 4, knob: 3, pause: 2, checkpoint: 1 };
const TEXTS = 5;

/** So many marks of what happens at nearly every step are shown; where there are more, none is. */
const FEW = 30;

/**
 * Marks that would lie on each other as one, with the text of all.
 * @param {import("./data.js").Entry[]} marks
 * @param {number} end
 */
export function grouped(marks, end) {
  const routine = marks.filter(([, , , kind]) => ROUTINE.has(kind)).length > FEW;
  const shown = routine ? marks.filter(([, , , kind]) => !ROUTINE.has(kind)) : marks;
  const groups = near(shown, end, NEAR[0]);
  return (groups.length > MANY ? near(shown, end, NEAR[1]) : groups).map(({ place, members }) => {
    const ranked = [...members].sort((a, b) => weight(b[3]) - weight(a[3]));
    const texts = ranked.slice(0, TEXTS).map(([, , step, kind, text]) => `step ${step ?? 0}: ${text || kindOf(kind).word}`);
    if (ranked.length > TEXTS) texts.push("…");
    return { step: members[0][2] ?? 0, place, kind: ranked[0][3], texts };
  });
}

/** @param {string} kind */
function weight(kind) {
  return WEIGHT[kind] ?? 0;
}

/**
 * @param {import("./data.js").Entry[]} marks
 * @param {number} end
 * @param {number} distance
 */
function near(marks, end, distance) {
  /** @type {{place: number, members: import("./data.js").Entry[]}[]} */
  const groups = [];
  for (const mark of marks) {
    const place = Math.min(1, Math.max(0, (mark[2] ?? 0) / end));
    const last = groups[groups.length - 1];
    if (last && place - last.place < distance) last.members.push(mark);
    else groups.push({ place, members: [mark] });
  }
  return groups;
}
