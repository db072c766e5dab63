// A tree with columns of which only the rows in sight are drawn.  The grid has the focus; the row
// that is meant is its active descendant, and is the selected one.

import { h } from "./looks.js";

export const ROW = 24;
const SPARE = 6;
/** Milliseconds after which typed letters begin a new word. */
const TYPING = 700;
const DEEPEST = 14;
let grids = 0;

/**
 * @typedef {import("./lineage.js").Row} Row
 * @typedef {{key: string, title: string, hint: string, least: number, share?: number, end?: boolean, cell: (row: Row) => Node | string}} Column
 * @typedef {{select: (row: Row) => void, open: () => void, toggle: (row: Row, open: boolean) => void, mark: (row: Row) => void, sort: (key: string) => void}} Deeds
 */

export class TreeGrid {
  /** @param {string} label @param {Deeds} deeds */
  constructor(label, deeds) {
    grids += 1;
    this._id = `xl-tree-${grids}`;
    this._deeds = deeds;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Column[]} */
    this._columns = [];
    this._key = "";
    this._drawn = new Map();
    this._typed = "";
    this._typedAt = 0;
    this._head = h("div", { role: "row", class: "xl-heads", "aria-rowindex": 1 });
    this._body = h("div", { role: "rowgroup", class: "xl-rows" });
    this.element = h("div", { role: "treegrid", tabindex: 0, class: "xl-tree", "aria-label": label }, h("div", { role: "rowgroup", class: "xl-headgroup" }, this._head), this._body);
    this.element.addEventListener("scroll", () => this._paint(), { passive: true });
    this.element.addEventListener("keydown", (event) => this._pressed(event));
    this._body.addEventListener("click", (event) => this._clicked(event));
    this._body.addEventListener("dblclick", (event) => {
      if (this._rowOf(event.target) && !event.target.closest(".xl-twist")) deeds.open();
    });
    let placed = false;
    this._sizes = new ResizeObserver(() => {
      if (!placed && this.element.clientHeight) {
        placed = true;
        this.reveal();
      }
      this._paint();
    });
    this._sizes.observe(this.element);
  }

  destroy() {
    this._sizes.disconnect();
  }

  /** The row that is selected. */
  get selected() {
    return this.rows.find((row) => row.node.key === this._key) ?? null;
  }

  /**
   * @param {Column[]} columns
   * @param {{by: string, down: boolean} | null} order  null = by lineage
   */
  columns(columns, order) {
    this._columns = columns;
    this.element.style.setProperty("--xl-cols", columns.map(({ least, share }) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`)).join(" "));
    this.element.style.setProperty("--xl-least", `${columns.reduce((sum, { least }) => sum + least, 0)}px`);
    const focused = this._head.contains(document.activeElement) ? document.activeElement.dataset.by : null;
    this._head.replaceChildren(
      ...columns.map((column) => {
        const sorted = order?.by === column.key;
        const way = !sorted ? "" : order.down ? "▼" : "▲";
        const button = h("button", { type: "button", class: "xl-sort", title: column.hint, "data-by": column.key }, h("span", {}, column.title), h("span", { class: "xl-way", "aria-hidden": "true" }, way));
        button.addEventListener("click", () => this._deeds.sort(column.key));
        return h("div", { role: "columnheader", class: `xl-cell ${column.end ? "xl-end" : ""}`, "aria-sort": sorted ? (order.down ? "descending" : "ascending") : null }, button);
      }),
    );
    if (focused) this._head.querySelector(`[data-by="${CSS.escape(focused)}"]`)?.focus();
  }

  /** @param {Row[]} rows @param {string} key  of the selected one */
  show(rows, key) {
    this.rows = rows;
    this._key = key;
    this.element.setAttribute("aria-rowcount", String(rows.length + 1));
    this._body.style.height = `${rows.length * ROW}px`;
    this.redraw();
  }

  /** Draw the rows in sight anew. */
  redraw() {
    this._drawn.clear();
    this._paint(true);
  }

  /** Select a row and bring it into sight. @param {Row | undefined} row */
  go(row) {
    if (!row) return;
    this._key = row.node.key;
    this._reveal(this.rows.indexOf(row));
    this._deeds.select(row);
    this.redraw();
  }

  /** Bring the selected row into sight. */
  reveal() {
    this._reveal(this.rows.findIndex((row) => row.node.key === this._key));
    this._paint();
  }

  _reveal(index) {
    const space = this.element.clientHeight - this._head.offsetHeight;
    if (index < 0 || space <= 0) return;
    const top = index * ROW;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + ROW > this.element.scrollTop + space) this.element.scrollTop = top + ROW - space;
  }

  _paint(anew = false) {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, first + Math.ceil((this.element.clientHeight || 400) / ROW) + 2 * SPARE);
    if (!anew && first === this._first && last === this._last) return;
    [this._first, this._last] = [first, last];
    // The selected row stays in the page, for the grid refers to it.
    const chosen = this.rows.findIndex((row) => row.node.key === this._key);
    const wanted = Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
    if (chosen >= 0 && chosen < first) wanted.unshift(chosen);
    else if (chosen >= last) wanted.push(chosen);
    // What stays is left where it is, so that only what is new is laid out.
    const kept = new Set(wanted.map((index) => this._row(index)));
    for (const row of [...this._body.children]) if (!kept.has(row)) row.remove();
    let at = this._body.firstElementChild;
    for (const row of kept) {
      if (row === at) at = at.nextElementSibling;
      else this._body.insertBefore(row, at);
    }
    if (chosen >= 0) this.element.setAttribute("aria-activedescendant", `${this._id}-${chosen}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  _row(index) {
    const known = this._drawn.get(index);
    if (known) return known;
    const row = this.rows[index];
    const chosen = row.node.key === this._key;
    const element = h("div", {
      role: "row",
      id: `${this._id}-${index}`,
      class: `xl-row xl-of-${row.node.kind}`,
      "data-index": index,
      "aria-rowindex": index + 2,
      "aria-level": row.level,
      "aria-posinset": row.at,
      "aria-setsize": row.of,
      "aria-selected": String(chosen),
      "aria-expanded": row.expanded === null ? null : String(row.expanded),
    });
    element.style.top = `${index * ROW}px`;
    const wide = row.node.kind !== "checkpoint";
    this._columns.forEach((column, i) => {
      if (wide && i > 0) return; // what is no checkpoint has no values, and its name the whole line
      const content = column.cell(row);
      const cell = h("div", { role: "gridcell", "aria-colspan": wide ? this._columns.length : null, class: `xl-cell ${column.end ? "xl-end" : ""}` });
      if (i === 0) cell.append(...guides(row), twist(row));
      cell.append(content);
      element.append(cell);
    });
    this._drawn.set(index, element);
    return element;
  }

  _rowOf(target) {
    const element = target.closest?.(".xl-row");
    return element ? this.rows[Number(element.dataset.index)] : undefined;
  }

  _clicked(event) {
    const row = this._rowOf(event.target);
    if (!row) return;
    if (event.target.closest(".xl-twist") && row.expanded !== null) this._deeds.toggle(row, !row.expanded);
    else if (event.shiftKey || event.ctrlKey || event.metaKey) this._deeds.mark(row);
    else this.go(row);
  }

  /** @param {KeyboardEvent} event */
  _pressed(event) {
    if (event.target !== this.element || event.altKey || event.ctrlKey || event.metaKey) return;
    const at = this.rows.findIndex((row) => row.node.key === this._key);
    const row = this.rows[at];
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const to = (index) => this.go(this.rows[Math.max(0, Math.min(this.rows.length - 1, index))]);
    const deeds = {
      ArrowDown: () => to(at + 1),
      ArrowUp: () => to(at < 0 ? 0 : at - 1),
      PageDown: () => to(at + page),
      PageUp: () => to(at - page),
      Home: () => to(0),
      End: () => to(this.rows.length - 1),
      ArrowRight: () => row && this._right(row, at),
      ArrowLeft: () => row && this._left(row),
      Enter: () => row && this._deeds.open(),
      " ": () => row && this._deeds.mark(row),
    };
    const deed = deeds[event.key];
    if (deed) deed();
    else if (event.key.length === 1) this._type(event.key, at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  _right(row, at) {
    if (row.expanded === false) this._deeds.toggle(row, true);
    else if (row.expanded) this.go(this.rows[at + 1]);
  }

  _left(row) {
    if (row.expanded) this._deeds.toggle(row, false);
    else if (row.level > 1) this.go(this.rows.find((other) => other.node === row.node.parent));
  }

  /** Go to the next row whose name begins with what was typed. */
  _type(letter, at) {
    const now = performance.now();
    this._typed = now - this._typedAt < TYPING ? this._typed + letter.toLowerCase() : letter.toLowerCase();
    this._typedAt = now;
    const from = at + (this._typed.length > 1 ? 0 : 1);
    const around = [...this.rows.slice(Math.max(0, from)), ...this.rows.slice(0, Math.max(0, from))];
    this.go(around.find((row) => row.label.toLowerCase().startsWith(this._typed)));
  }
}

/** Lines from a row to what it hangs on. @param {Row} row */
function guides(row) {
  const skipped = Math.max(0, row.guides.length - DEEPEST);
  return row.guides.slice(skipped).map((goes, i, all) => {
    const last = i === all.length - 1;
    return h("span", { class: `xl-guide ${goes ? "xl-goes" : ""} ${last ? "xl-turn" : ""}`, "aria-hidden": "true" });
  });
}

/** @param {Row} row */
function twist(row) {
  const glyph = row.expanded === null ? "" : row.expanded ? "▾" : "▸";
  return h("span", { class: "xl-twist", "aria-hidden": "true" }, glyph);
}
