// The tokens of one text as a flow of spans.  Rows of some 200 tokens are filled when they come near
// the view, and coloured when they are seen, so that 100,000 tokens cost no more than a screenful.

import { h } from "./looks.js";
import { visible } from "./visible.js";

const ROW = 120;
const LONGEST_ROW = 240;
/** Up to so many tokens the rest is filled while the page has nothing to do, for the page's search. */
const FILLED = 40_000;
const LINE = 21;
const PAUSE = 400;
/** Milliseconds of a piece of such work. */
const CHUNK = 10;

/** @type {(work: (deadline: {timeRemaining: () => number}) => void) => number} */
const idle = globalThis.requestIdleCallback ?? ((work) => setTimeout(() => work({ timeRemaining: () => 4 }), 30));

/**
 * @typedef {import("./sequence.js").Sequence} Sequence
 */

export class TokenView {
  /**
   * @param {{label: string, picked: (view: TokenView, unit: number) => void, hovered: (view: TokenView, unit: number | null) => void}} options
   */
  constructor({ label, picked, hovered }) {
    this._picked = picked;
    this.element = h("div", { class: "xl-flow", role: "listbox", tabindex: 0, "aria-label": label, dir: "ltr" });
    /** @type {Sequence | null} */
    this.sequence = null;
    this.selected = -1;
    this.raw = false;
    /** Tokens that are the same as in the text beside; -1 where there is none. */
    this.shared = -1;
    /** @type {{element: HTMLElement, from: number, to: number, filled: boolean, painted: number}[]} */
    this._rows = [];
    this._colours = [];
    this._version = 0;
    this._near = new Set();
    this._observer = new IntersectionObserver((entries) => this._see(entries), { root: this.element, rootMargin: "300px 0px" });
    this.element.addEventListener("keydown", (event) => this._key(event));
    this.element.addEventListener("click", (event) => {
      const unit = this._unitAt(event.target);
      if (unit !== null) this.select(unit);
    });
    this.element.addEventListener("pointerover", (event) => hovered(this, this._unitAt(event.target)));
    this.element.addEventListener("pointerleave", () => hovered(this, null));
    this.element.addEventListener("focus", () => {
      if (this.selected < 0 && this.sequence?.units) this.select(0);
      else if (this.selected >= 0) picked(this, this.selected);
    });
  }

  /**
   * @param {Sequence} sequence
   * @param {number} [from]  first unit that is shown
   */
  show(sequence, from = 0) {
    this.sequence = sequence;
    this.from = from;
    this.selected = -1;
    this._observer.disconnect();
    this._near.clear();
    this._rows = rowsOf(sequence, from).map(([first, last]) => ({ element: null, from: first, to: last, filled: false, painted: -1 }));
    const wide = Math.max(20, (this.element.clientWidth || 700) / 7.4);
    for (const row of this._rows) {
      const lines = Math.ceil(sequence.lengthOf(row.from, row.to) / wide) + newlines(sequence, row.from, row.to);
      row.element = h("div", { class: "xl-tokens", role: "presentation" });
      row.element.style.containIntrinsicBlockSize = `auto ${lines * LINE}px`;
      row.element.style.minHeight = `${lines * LINE}px`;
      /** @type {any} */ (row.element).xlRow = row;
    }
    this.element.replaceChildren(...this._rows.map((row) => row.element));
    if (!sequence.units) this.element.append(h("p", { class: "xl-none" }, "No token was drawn."));
    this.element.scrollTop = 0;
    // What is seen at first is there at once; the observer speaks a frame later.
    let height = 0;
    for (const row of this._rows) {
      this._tend(row);
      height += parseFloat(row.element.style.containIntrinsicBlockSize.split(" ")[1] ?? "0");
      if (height > 700) break;
    }
    this._rows.forEach((row) => this._observer.observe(row.element));
    this._later();
  }

  /** @param {string[]} colours  a class per unit */
  paint(colours) {
    this._colours = colours;
    this._version += 1;
    const root = this.element.getBoundingClientRect();
    let seen = false;
    for (const row of this._near) {
      const box = row.element.getBoundingClientRect();
      if (box.bottom < root.top || box.top > root.bottom) continue;
      seen = true;
      this._tend(row);
    }
    if (!seen) this._rows.slice(0, 4).filter((row) => row.filled).forEach((row) => this._tend(row));
    this._later();
  }

  /** @param {boolean} raw */
  write(raw) {
    if (raw === this.raw) return;
    this.raw = raw;
    this.element.classList.toggle("xl-raw", raw);
    for (const row of this._rows) row.filled = false;
    for (const row of this._near) this._tend(row);
    this._later();
  }

  /** How many of the tokens are shared with the text beside; -1: there is none. */
  compare(shared) {
    this.shared = shared;
    this.paint(this._colours);
  }

  /**
   * @param {number} unit
   * @param {{quiet?: boolean}} [how]
   */
  select(unit, { quiet = false } = {}) {
    if (!this.sequence || unit < this.from || unit >= this.sequence.units) return;
    this._spanOf(this.selected)?.classList.remove("xl-on");
    this._spanOf(this.selected)?.removeAttribute("aria-selected");
    this.selected = unit;
    const row = this._rowOf(unit);
    this._tend(row);
    const span = this._spanOf(unit);
    span.classList.add("xl-on");
    span.setAttribute("aria-selected", "true");
    span.id ||= `xl-token-${Math.random().toString(36).slice(2)}`;
    this.element.setAttribute("aria-activedescendant", span.id);
    this._reveal(span);
    if (!quiet) this._picked(this, unit);
  }

  destroy() {
    this._observer.disconnect();
    clearTimeout(this._timer);
    this._gone = true;
  }

  _see(entries) {
    for (const entry of entries) {
      const row = /** @type {any} */ (entry.target).xlRow;
      if (!entry.isIntersecting) {
        this._near.delete(row);
        continue;
      }
      this._near.add(row);
      this._tend(row);
    }
  }

  /** Bring a row up to date. */
  _tend(row) {
    if (!row.filled) this._fill(row);
    if (row.painted !== this._version) this._colour(row);
  }

  _fill(row) {
    const { sequence, raw } = this;
    const fragment = document.createDocumentFragment();
    for (let unit = row.from; unit < row.to; unit += 1) {
      const span = document.createElement("span");
      span.setAttribute("role", "option");
      const special = sequence.isSpecial(sequence.start(unit));
      const parts = special && !raw ? [{ text: "◆", mark: true, title: "special token" }] : visible(sequence.textOf(unit), raw);
      if (parts.length === 1 && !parts[0].mark) span.textContent = parts[0].text;
      else for (const part of parts) span.append(part.mark ? marked(part) : part.text);
      /** @type {any} */ (span).xlUnit = unit;
      fragment.append(span);
    }
    row.element.replaceChildren(fragment);
    row.element.style.minHeight = "";
    row.filled = true;
    row.painted = -1;
  }

  _colour(row) {
    const { sequence, shared } = this;
    let unit = row.from;
    for (const span of row.element.children) {
      const first = sequence.start(unit);
      let name = `xl-t xl-${this._colours[unit] ?? "void"}`;
      const end = sequence.start(unit + 1);
      let flags = 0;
      for (let token = first; token < end; token += 1) flags |= sequence.flags(token);
      if (flags) name += `${flags & 1 ? " xl-clipped" : ""}${flags & 2 ? " xl-masked" : ""}${flags & 4 ? " xl-cut" : ""}`;
      if (sequence.isRead(first)) name = "xl-t xl-read";
      if (sequence.isSpecial(first)) name += " xl-special";
      if (shared >= 0 && end <= shared) name += " xl-shared";
      if (shared >= first && shared < end) name += " xl-fork";
      if (unit === this.selected) name += " xl-on";
      span.className = name;
      unit += 1;
    }
    row.painted = this._version;
  }

  /** Do the rest when the page has time, and a person has stopped for a moment. */
  _later(pause = PAUSE) {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._rest(), pause);
  }

  _rest() {
    idle((deadline) => {
      if (this._gone || !this.sequence) return;
      const small = this.sequence.units <= FILLED;
      const stale = (row) => (!row.filled && small) || (row.filled && row.painted !== this._version);
      const left = this._rows.filter(stale);
      const start = performance.now();
      let done = 0;
      while (done < left.length && (done === 0 || (deadline.timeRemaining() > 4 && performance.now() - start < CHUNK))) {
        this._tend(left[done]);
        done += 1;
      }
      if (done < left.length) this._later(0);
    });
  }

  _rowOf(unit) {
    let low = 0;
    let high = this._rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this._rows[middle].from <= unit) low = middle;
      else high = middle - 1;
    }
    return this._rows[low];
  }

  _spanOf(unit) {
    if (unit < (this.from ?? 0) || !this._rows.length) return null;
    const row = this._rowOf(unit);
    return /** @type {HTMLElement | null} */ (row?.filled ? row.element.children[unit - row.from] : null);
  }

  /** @param {EventTarget} target */
  _unitAt(target) {
    const span = /** @type {any} */ (target).closest?.(".xl-t");
    return span ? span.xlUnit : null;
  }

  /** Scroll this element alone, and as little as needed. */
  _reveal(span) {
    const box = span.getBoundingClientRect();
    const root = this.element.getBoundingClientRect();
    const room = 30;
    if (box.top < root.top + 4) this.element.scrollTop -= root.top - box.top + room;
    else if (box.bottom > root.bottom - 4) this.element.scrollTop += Math.min(box.bottom - root.bottom + room, box.top - root.top);
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.sequence) return;
    const go = this._keys()[event.key];
    if (!go) return;
    event.preventDefault();
    event.stopPropagation();
    go();
  }

  _keys() {
    const last = this.sequence.units - 1;
    const at = (unit) => this.select(Math.max(this.from, Math.min(last, unit)));
    return {
      ArrowRight: () => at(this.selected + 1),
      ArrowLeft: () => at(this.selected - 1),
      ArrowDown: () => this._line(1, 0),
      ArrowUp: () => this._line(-1, 0),
      PageDown: () => this._line(1, this.element.clientHeight * 0.8),
      PageUp: () => this._line(-1, this.element.clientHeight * 0.8),
      Home: () => at(this.from),
      End: () => at(last),
      n: () => this._flagged(1),
      p: () => this._flagged(-1),
    };
  }

  _flagged(by) {
    const { sequence } = this;
    for (let unit = this.selected + by; unit >= this.from && unit < sequence.units; unit += by) {
      for (let token = sequence.start(unit); token < sequence.start(unit + 1); token += 1) {
        if (sequence.flags(token)) return this.select(unit);
      }
    }
  }

  /** To the token below or above, at least `far` pixels away. */
  _line(by, far) {
    const start = this._spanOf(this.selected);
    if (!start) return this.select(this.from);
    const box = start.getBoundingClientRect();
    const middle = (box.left + box.right) / 2;
    let best = -1;
    let line = NaN;
    let gap = Infinity;
    let unit = this.selected;
    for (unit += by; unit >= this.from && unit < this.sequence.units; unit += by) {
      this._tend(this._rowOf(unit));
      const here = this._spanOf(unit).getBoundingClientRect();
      if (by * (here.top - box.top) < Math.max(6, far)) continue;
      if (Number.isNaN(line)) line = here.top;
      if (Math.abs(here.top - line) > 6) break;
      const away = Math.abs((here.left + here.right) / 2 - middle);
      if (away < gap) [best, gap] = [unit, away];
    }
    this.select(best >= 0 ? best : by > 0 ? this.sequence.units - 1 : this.from);
  }
}

function marked({ text, title }) {
  return h("i", { class: "xl-sign", title: title ?? null }, text);
}

function newlines(sequence, from, to) {
  if (!sequence.spelled) return 0;
  let count = 0;
  for (let unit = from; unit < to; unit += 1) if (sequence.textOf(unit).includes("\n")) count += 1;
  return count;
}

/**
 * Rows, which end at a line's end where there is one.
 * @param {Sequence} sequence
 * @param {number} from
 * @returns {[number, number][]}
 */
export function rowsOf(sequence, from = 0) {
  const rows = [];
  let first = from;
  for (let unit = from; unit < sequence.units; unit += 1) {
    const size = unit - first + 1;
    const ends = size >= ROW && sequence.spelled && sequence.textOf(unit).endsWith("\n");
    if (ends || size >= LONGEST_ROW) {
      rows.push([first, unit + 1]);
      first = unit + 1;
    }
  }
  if (first < sequence.units) rows.push([first, sequence.units]);
  return rows;
}
