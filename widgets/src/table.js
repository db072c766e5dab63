// A table of any number of rows, of which only those in view are in the page.

import { cellText, columnOf } from "./columns.js";
import { h, number } from "./looks.js";
import { oneLine } from "./visible.js";

const HEIGHT = 26;
const BEYOND = 8;
const SETTLED = 80;

/**
 * @typedef {{run: number, id: number}} Place
 */

export class Table {
  /**
   * @param {{rows: import("./rows.js").Rows, runs: {name: string}[], open: (row: any) => void, beside: (row: any) => void, sort: (name: string) => void}} options
   */
  constructor({ rows, runs, open, beside, sort }) {
    this._rows = rows;
    this._runs = runs;
    this._open = open;
    this._beside = beside;
    this._sort = sort;
    this.grouped = false;
    /** @type {ReturnType<typeof columnOf>[]} */
    this.columns = [];
    this.sortable = new Set();
    this.active = -1;
    /** @type {Place | null} */
    this.opened = null;
    /** Groups that are unfolded, with how many rollouts each has. @type {Map<number, number>} */
    this._unfolded = new Map();
    /** @type {[number, number]} */
    this._span = [0, 1];
    this._head = h("div", { class: "xl-thead", role: "row" });
    this._empty = h("p", { class: "xl-none", hidden: true });
    this._body = h("div", { class: "xl-tbody", role: "presentation" }, this._empty);
    /** Lines in the page, by index. @type {Map<number, {sign: string, element: HTMLElement}>} */
    this._lines = new Map();
    this._version = 0;
    this._before = 0;
    this.element = h("div", { class: "xl-table", role: "grid", tabindex: 0, "aria-label": "Rollouts" }, this._head, this._body);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this._key(event));
    this.element.addEventListener("focus", () => this.active < 0 && this._count() && this._go(0));
    // Shift+click puts a row beside another; it selects no text.
    this._body.addEventListener("mousedown", (event) => event.shiftKey && event.preventDefault());
    this._body.addEventListener("click", (event) => this._click(event));
    this._sizes = new ResizeObserver(() => this.draw());
    this._sizes.observe(this.element);
  }

  get top() {
    return this.element.scrollTop < HEIGHT;
  }

  /** Whether a person is in the table. */
  get busy() {
    return this.element.contains(document.activeElement) || this._unfolded.size > 0;
  }

  /** @param {string[]} names @param {string[]} sortable @param {{order_by: string, descending: boolean}} order */
  arrange(names, sortable, order) {
    this.columns = names.map(columnOf);
    this._version += 1;
    this.sortable = new Set(sortable);
    const fluid = this.columns.filter((c) => !c.width).length;
    const tracks = this.columns.map((c) => (c.width ? `${c.width}px` : c.name === "prompt" && fluid > 1 ? "minmax(110px, 2fr)" : "minmax(150px, 5fr)"));
    this.element.style.setProperty("--xl-tracks", tracks.join(" "));
    const least = this.columns.reduce((sum, c) => sum + (c.width || (c.name === "prompt" && fluid > 1 ? 110 : 150)) + 16, 0);
    this.element.style.setProperty("--xl-least", `${least}px`);
    this.element.setAttribute("aria-colcount", String(names.length));
    this._head.replaceChildren(
      ...this.columns.map((column) => {
        const sorted = order.order_by === column.name;
        const can = this.sortable.has(column.name);
        const label = [column.title, h("span", { class: "xl-arrow", "aria-hidden": "true" }, sorted ? (order.descending ? "▼" : "▲") : "")];
        const head = can ? h("button", { type: "button", class: "xl-sort", title: `Sort by ${column.title}`, tabindex: -1 }, ...label) : h("span", {}, column.title);
        if (can) head.addEventListener("click", () => this._sort(column.name));
        return h("div", { class: `xl-th${column.words ? "" : " xl-number"}`, role: "columnheader", "aria-sort": sorted ? (order.descending ? "descending" : "ascending") : can ? "none" : null }, head);
      }),
    );
    this.draw();
  }

  /** Another answer is there. @param {{keep?: boolean}} [how] */
  reset({ keep = false } = {}) {
    this._unfolded.clear();
    this.active = -1;
    this.element.removeAttribute("aria-activedescendant");
    if (!keep) this.element.scrollTop = 0;
    this.draw();
  }

  /** Greatest and least of all rewards in view: what the dots are drawn between. */
  spread(low, high) {
    if (low === this._span[0] && high === this._span[1]) return;
    this._version += 1;
    this._span = high > low ? [low, high] : [low - 0.5, low + 0.5];
  }

  draw() {
    if (this._due) return;
    this._due = true;
    requestAnimationFrame(() => {
      this._due = false;
      this._draw();
    });
  }

  destroy() {
    clearTimeout(this._timer);
    this._sizes.disconnect();
  }

  _count() {
    let count = this._rows.count;
    for (const size of this._unfolded.values()) count += size;
    return count;
  }

  /** What stands in a line: a row of the answer, or a rollout of an unfolded group. */
  _line(index) {
    let before = 0;
    for (const [group, size] of [...this._unfolded].sort((a, b) => a[0] - b[0])) {
      const at = group + before;
      if (index <= at) break;
      if (index <= at + size) return { row: group, child: index - at - 1 };
      before += size;
    }
    return { row: index - before, child: -1 };
  }

  _draw() {
    const count = this._count();
    const { scrollTop, clientHeight } = this.element;
    this._body.style.height = `${count * HEIGHT}px`;
    this.element.setAttribute("aria-rowcount", String(count + 1));
    const first = Math.max(0, Math.floor(scrollTop / HEIGHT) - BEYOND);
    const last = Math.min(count, Math.ceil((scrollTop + (clientHeight || 260)) / HEIGHT) + BEYOND);
    // What flies past is not asked for.
    const flying = Math.abs(scrollTop - this._before) > 1.5 * clientHeight;
    this._before = scrollTop;
    clearTimeout(this._timer);
    if (flying) this._timer = setTimeout(() => this.draw(), SETTLED);
    else if (last > first) this._rows.want(this._line(first).row, this._line(last - 1).row + 1);
    /** @type {typeof this._lines} */
    const lines = new Map();
    for (let i = first; i < last; i += 1) lines.set(i, this._drawn(i));
    // A row that stays is not touched: a click on one that is taken out meanwhile would be lost.
    for (const [i, { element }] of this._lines) if (lines.get(i)?.element !== element) element.remove();
    for (const [i, { element }] of lines) if (this._lines.get(i)?.element !== element) this._body.append(element);
    this._lines = lines;
    this._empty.hidden = count > 0;
    this._empty.textContent = this.waiting ? "…" : "No rollout meets all of this.";
  }

  /** The line as it is drawn, or drawn anew if it stands for something else by now. */
  _drawn(index) {
    const { row: at, child } = this._line(index);
    const group = this._rows.at(at);
    const row = child < 0 ? group : (this._rows.rollouts(at)[child] ?? null);
    const isGroup = this.grouped && child < 0;
    const sign = [this._rows.key, at, child, Boolean(row), this._version, isGroup && this._unfolded.has(at)].join();
    const before = this._lines.get(index);
    const line = before?.sign === sign ? before : { sign, element: turned(before?.element, this._drawLine(index, row, at, child)) };
    const open = Boolean(row && !isGroup && this.opened && row.id === this.opened.id && row.run === this.opened.run);
    line.element.classList.toggle("xl-active", index === this.active);
    line.element.classList.toggle("xl-open", open);
    line.element.setAttribute("aria-selected", String(open));
    return line;
  }

  _drawLine(index, row, at, child) {
    const isGroup = this.grouped && child < 0;
    const element = h("div", {
      class: `xl-tr${child >= 0 ? " xl-child" : ""}${isGroup ? " xl-group" : ""}`, role: "row", id: `${this._name()}-${index}`, "aria-rowindex": index + 2,
      "aria-expanded": isGroup ? String(this._unfolded.has(at)) : null, "data-line": index, "data-id": row && !isGroup ? row.id : null,
    });
    element.style.transform = `translateY(${index * HEIGHT}px)`;
    if (!row) element.append(h("div", { class: "xl-td xl-unit", role: "gridcell" }, "…"));
    else if (this.grouped && child >= 0) element.append(...this._childCells(row));
    else element.append(...this.columns.map((column) => this._cell(column, row, at)));
    return element;
  }

  _childCells(row) {
    const said = [`sample ${row.sample}`, row.reward === null ? "no reward" : `reward ${number(row.reward)}`, `${row.length} tokens`, row.stop_reason].join(" · ");
    return [h("div", { class: "xl-td xl-family", role: "gridcell" }, h("span", { class: "xl-unit" }, said), h("span", { class: "xl-preview" }, oneLine(row.text)))];
  }

  _cell(column, row, at) {
    const cell = h("div", { class: `xl-td${column.words ? "" : " xl-number"}`, role: "gridcell" });
    if (column.name === "rewards") cell.append(this._dots(at));
    else if (column.name === "tags") cell.append(...(row.tags ?? []).map((tag) => h("span", { class: "xl-chip" }, oneLine(tag))));
    else if (column.name === "run") cell.textContent = oneLine(this._runs[row.run]?.name);
    else if (column.text) {
      if (this.grouped && column.name === "prompt") cell.append(h("span", { class: "xl-fold", "aria-hidden": "true" }, this._unfolded.has(at) ? "▾" : "▸"));
      cell.append(oneLine(cellText(column, row[column.name])));
    } else if (column.name === "reward" && row.failed) {
      cell.append(h("span", { class: "xl-failed", title: row.error ?? "the reward function failed" }, "✕ failed"));
    } else cell.textContent = cellText(column, row[column.name]);
    if (column.name === "stop_reason" && row.stop_reason === "length") cell.classList.add("xl-warned");
    return cell;
  }

  /** The rewards of a group as dots on one scale. */
  _dots(at) {
    const [low, high] = this._span;
    const strip = h("span", { class: "xl-dots", role: "img" });
    const said = [];
    for (const { reward } of this._rows.rollouts(at)) {
      if (typeof reward !== "number") continue;
      said.push(number(reward));
      const dot = h("i", {});
      dot.style.left = `${(100 * (reward - low)) / (high - low)}%`;
      strip.append(dot);
    }
    strip.setAttribute("aria-label", said.length ? `rewards ${said.join(", ")}` : "no rewards");
    strip.title = said.join(", ");
    return strip;
  }

  _name() {
    this._id ??= `xl-rows-${Math.random().toString(36).slice(2)}`;
    return this._id;
  }

  _click(event) {
    const line = /** @type {HTMLElement} */ (event.target).closest(".xl-tr");
    if (!line) return;
    this._go(Number(/** @type {HTMLElement} */ (line).dataset.line));
    this._act(this.active, event.shiftKey);
  }

  /** Open the rollout of a line, or fold a group. */
  async _act(index, beside = false) {
    const { row: at, child } = this._line(index);
    if (!this._rows.at(at)) await this._rows.get(at);
    if (this.grouped && child < 0) {
      if (this._unfolded.has(at)) this._unfolded.delete(at);
      else if (this._rows.at(at)) this._unfolded.set(at, this._rows.at(at).ids.length);
      this.draw();
      return;
    }
    const row = child < 0 ? this._rows.at(at) : this._rows.rollouts(at)[child];
    if (row) (beside ? this._beside : this._open)(row);
  }

  /** The rollout `by` lines away from the active one is opened. */
  async step(by) {
    let index = this.active + by;
    while (this.grouped && index >= 0 && index < this._count() && this._line(index).child < 0) index += by;
    if (index < 0 || index >= this._count()) return;
    await this._rows.get(this._line(index).row);
    this._go(index);
    this._act(index);
  }

  _go(index) {
    const count = this._count();
    if (!count) return;
    this.active = Math.max(0, Math.min(count - 1, index));
    const top = this.active * HEIGHT;
    const room = this.element.clientHeight - HEIGHT - 2;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + HEIGHT > this.element.scrollTop + room) this.element.scrollTop = top + HEIGHT - room;
    this._draw();
    this.element.setAttribute("aria-activedescendant", `${this._name()}-${this.active}`);
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / HEIGHT) - 2);
    const keys = {
      ArrowDown: () => this._go(this.active + 1),
      ArrowUp: () => this._go(this.active - 1),
      PageDown: () => this._go(this.active + page),
      PageUp: () => this._go(this.active - page),
      Home: () => this._go(0),
      End: () => this._go(this._count() - 1),
      Enter: () => this._act(this.active),
      " ": () => this._act(this.active),
      c: () => this._act(this.active, true),
      ArrowRight: () => this._fold(true),
      ArrowLeft: () => this._fold(false),
    };
    const go = keys[event.key];
    if (!go || event.target !== this.element) return;
    event.preventDefault();
    event.stopPropagation();
    go();
  }

  _fold(open) {
    const { row, child } = this._line(this.active);
    if (this.grouped && child < 0 && this._unfolded.has(row) !== open) this._act(this.active);
  }
}

/** The element that is there, made the same as a fresh one: a click that has begun on it goes on. */
function turned(element, fresh) {
  if (!element) return fresh;
  for (const name of element.getAttributeNames()) if (!fresh.hasAttribute(name)) element.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) element.setAttribute(name, fresh.getAttribute(name));
  element.replaceChildren(...fresh.childNodes);
  return element;
}
