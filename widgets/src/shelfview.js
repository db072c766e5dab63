// One view of the checkpoints: filter and order, the tree, and what is done with the selected one.

import { Actions } from "./shelfactions.js";
import { Disk } from "./disk.js";
import { h, number, stateOf } from "./looks.js";
import { BASE, resumable } from "./lineage.js";
import { breaking, moment, size, span, shown, working } from "./shelfwords.js";
import { TreeGrid } from "./treegrid.js";

const DEAF = "The kernel does not answer while a cell runs.";
/** Milliseconds after which ages are written anew. */
const AGES = 20_000;
/** Seconds before its expiry at which a checkpoint is marked. */
const SOON = 3600;

export class Browser {
  /**
   * @param {HTMLElement} root
   * @param {{lineage: import("./lineage.js").Lineage, mark: string, error: string, deaf: boolean}} state
   * @param {(content: Record<string, unknown>) => Promise<{content: any}>} ask
   * @param {() => Promise<void>} look
   */
  constructor(root, state, ask, look) {
    this._state = state;
    this._closed = new Set();
    /** @type {{by: string, down: boolean} | null} */
    this._order = null;
    this._filter = "";
    this._key = "";
    this._other = "";
    /** @type {Set<string> | null} */
    this._metrics = null;
    this.inSight = true;
    this._disk = new Disk();
    this._grid = new TreeGrid("Checkpoints by lineage", {
      select: (row) => this._select(row.node),
      open: () => this._actions.focus(),
      toggle: (row, open) => this._toggle(row, open),
      mark: (row) => this._mark(row.node),
      sort: (key) => this._sort(key),
    });
    const context = {
      ask,
      changed: () => void look(),
      select: (name) => {
        const node = this._state.lineage.named(name);
        if (node) this._find(node);
      },
      lineage: () => this._state.lineage,
      other: (name) => {
        this._other = name;
        this._grid.redraw();
      },
    };
    this._actions = new Actions(context, () => this._grid.element.focus());
    root.append(this._tools(look), this._grid.element, this._empty, this._actions.element);
    this._sight = new IntersectionObserver((entries) => {
      this.inSight = entries.at(-1).isIntersecting;
      if (this.inSight) this._grid.redraw();
    });
    this._sight.observe(root);
    this._timer = setInterval(() => this.inSight && this._grid.redraw(), AGES);
    this._drawn = null;
    this.draw();
  }

  destroy() {
    clearInterval(this._timer);
    document.removeEventListener("pointerdown", this._outside);
    this._sight.disconnect();
    this._grid.destroy();
  }

  /** Draw what the kernel last said. */
  draw() {
    const { lineage, error, deaf } = this._state;
    this._trouble.textContent = error ? `✕ ${error}` : deaf ? DEAF : "";
    if (!lineage || lineage === this._drawn) return;
    const first = this._drawn === null;
    this._drawn = lineage;
    this._metrics ??= new Set(lineage.tree.main);
    this._chooser();
    this._disk.show(lineage.tree);
    const node = lineage.nodes.get(this._key);
    if (!node) this._key = this._near(first) ?? "";
    this._columns();
    this._rows();
    this._shown();
    this._counts();
  }

  _tools(look) {
    this._search = /** @type {HTMLInputElement} */ (h("input", { type: "search", class: "xl-filter", placeholder: "Filter: name, state, learning_rate=…", "aria-label": "Filter the checkpoints", spellcheck: "false", autocomplete: "off" }));
    this._search.addEventListener("input", () => {
      this._filter = this._search.value;
      this._rows();
      this._counts();
    });
    this._search.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this._search.value) this._search.value = "";
      else if (event.key !== "ArrowDown") return;
      else this._grid.element.focus();
      event.preventDefault();
      event.stopPropagation();
      this._search.dispatchEvent(new Event("input"));
    });
    this._byLineage = h("button", { type: "button", class: "xl-button", title: "Order by lineage: each below what it comes from" }, "By lineage");
    this._byLineage.addEventListener("click", () => this._sort(null));
    this._metricList = h("div", { class: "xl-choices" });
    const metrics = h("details", { class: "xl-chooser" }, h("summary", { class: "xl-button" }, "Metrics"), this._metricList);
    metrics.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !metrics.open) return;
      event.preventDefault();
      event.stopPropagation();
      metrics.open = false;
      metrics.querySelector("summary").focus();
    });
    metrics.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !metrics.contains(event.relatedTarget)) metrics.open = false;
    });
    this._outside = (event) => {
      if (metrics.open && !metrics.contains(event.target)) metrics.open = false;
    };
    document.addEventListener("pointerdown", this._outside);
    const refresh = h("button", { type: "button", class: "xl-button", title: "Look again now; it looks by itself every few seconds" }, "↻ Refresh");
    refresh.addEventListener("click", () => working(this._note, "Looking", async () => (await look(), { content: this._state.error ? { error: this._state.error } : {} })));
    this._count = h("span", { class: "xl-count", role: "status", "aria-live": "polite" });
    this._note = h("span", { class: "xl-note-line" });
    this._trouble = h("p", { class: "xl-note-line xl-bad", role: "alert" });
    this._empty = h("p", { class: "xl-none" });
    return h("div", { class: "xl-shelf-top" }, h("div", { class: "xl-shelf-tools" }, this._search, this._byLineage, metrics, refresh, this._note, h("span", { class: "xl-fill" }), this._count), this._disk.element, this._trouble);
  }

  _chooser() {
    const { metrics } = this._state.lineage.tree;
    if (this._listed === metrics.join("\n")) return;
    this._listed = metrics.join("\n");
    this._metricList.replaceChildren(
      ...metrics.map((name) => {
        const box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox" }));
        box.checked = this._metrics.has(name);
        box.addEventListener("change", () => {
          if (box.checked) this._metrics.add(name);
          else this._metrics.delete(name);
          this._columns();
          this._grid.redraw();
        });
        return h("label", { class: "xl-check" }, box, shown(name));
      }),
    );
    if (!metrics.length) this._metricList.append(h("p", { class: "xl-muted" }, "None was measured yet."));
  }

  _columns() {
    const now = () => Date.now() / 1000;
    const of = (fill) => (row) => (row.node.checkpoint && row.node.name !== BASE ? fill(row.node.checkpoint) : "");
    const titled = (text, title) => h("span", { title }, text);
    const metric = (name) => ({
      key: `metric ${name}`,
      title: breaking(name),
      hint: `Order by ${shown(name)}`,
      least: 78, share: 1,
      end: true,
      cell: of((c) => (name in c.metrics ? number(c.metrics[name]) : "")),
    });
    const { metrics } = this._state.lineage.tree;
    this._grid.columns(
      [
        { key: "name", title: "Name", hint: "Order by name", least: 180, share: 3, cell: (row) => this._name(row) },
        { key: "step", title: "Step", hint: "Order by step", least: 52, end: true, cell: of((c) => (c.step === null ? "" : String(c.step))) },
        ...metrics.filter((name) => this._metrics.has(name)).map(metric),
        { key: "megabytes", title: "Size", hint: "Order by size", least: 64, end: true, cell: of((c) => size(c.megabytes * 1e6)) },
        { key: "created", title: "Age", hint: "Order by age", least: 58, end: true, cell: of((c) => (c.created === null ? "" : titled(span(now() - c.created), moment(c.created)))) },
        { key: "expires", title: "Expires", hint: "Order by expiry", least: 70, end: true, cell: of((c) => expiry(c.expires, now())) },
        { key: "kind", title: "Kind", hint: "Order by kind", least: 98, cell: of((c) => (resumable(c) ? titled("↻ resumable", "training can go on from it") : titled("◌ sampling", "saved for sampling only"))) },
      ],
      this._order,
    );
  }

  _name(row) {
    const { node } = row;
    const cell = h("span", { class: "xl-named" }, h("span", { class: "xl-name", title: shown(node.name) }, shown(row.label)));
    if (node.kind === "run" && node.run.state) {
      const state = stateOf(node.run.state);
      cell.append(h("span", { class: `xl-state xl-is-${/^[a-z]+$/.test(node.run.state) ? node.run.state : "unknown"}` }, `${state.glyph} ${state.final && node.run.state === "crashed" ? "crashed" : state.text}`), h("span", { class: "xl-muted" }, shown(node.run.kind)));
    }
    if (node.kind === "run") {
      const count = node.children.filter((child) => child.checkpoint).length;
      cell.append(h("span", { class: "xl-muted" }, `${count} checkpoint${count === 1 ? "" : "s"}`));
    }
    if (node.kind === "base") cell.append(h("span", { class: "xl-muted" }, "the model before training"));
    if (node.kind === "gone") cell.append(h("span", { class: "xl-muted" }, "✕ deleted"));
    if (node.checkpoint?.held) cell.append(h("span", { class: "xl-held", title: shown(node.checkpoint.held) }, "kept"));
    if (node.name === this._other && node.key !== this._key) cell.append(h("span", { class: "xl-badge", title: "what the selected one is compared with" }, "B"));
    return cell;
  }

  _rows() {
    const { lineage } = this._state;
    const rows = this._order ? lineage.list(this._order, this._filter) : lineage.rows(this._closed, this._filter);
    this._grid.show(rows, this._key);
    this._byLineage.setAttribute("aria-pressed", String(!this._order));
    this._empty.textContent = rows.length ? "" : this._filter ? "Nothing fits this filter." : "There is no checkpoint yet: a run saves some while it trains.";
    this._empty.hidden = rows.length > 0;
    this._grid.element.classList.toggle("xl-bare", !rows.length);
  }

  _counts() {
    const { lineage } = this._state;
    const all = lineage.names().length - 1;
    const shown = this._filter ? `${lineage.list({ by: "name", down: false }, this._filter).length} of ` : "";
    const runs = lineage.tree.runs.length;
    this._count.textContent = `${shown}${all} checkpoint${all === 1 ? "" : "s"} · ${runs} run${runs === 1 ? "" : "s"}`;
  }

  _select(node) {
    this._key = node.key;
    this._shown();
  }

  _shown() {
    this._actions.show(this._state.lineage.nodes.get(this._key) ?? null, Date.now() / 1000);
  }

  /** Select a row, and open what hides it. */
  _find(node) {
    for (let at = node.parent; at; at = at.parent) this._closed.delete(at.key);
    this._key = node.key;
    this._rows();
    this._grid.reveal();
    this._shown();
  }

  /** What is selected where nothing is: at first the newest; then what stood where a deleted one was. */
  _near(first) {
    const { lineage } = this._state;
    const newest = lineage.list({ by: "created", down: true }, "")[0];
    if (first) return (newest?.node ?? lineage.root).key;
    const left = this._grid.rows.findIndex((row) => row.node.key === this._key);
    const around = [...this._grid.rows.slice(0, left).reverse(), ...this._grid.rows.slice(left)];
    return around.find((row) => lineage.nodes.has(row.node.key))?.node.key ?? lineage.root.key;
  }

  _toggle(row, open) {
    if (open) this._closed.delete(row.node.key);
    else this._closed.add(row.node.key);
    this._rows();
  }

  _mark(node) {
    if (!node.checkpoint && node.kind !== "base") return;
    this._actions.against(node);
  }

  /** @param {string | null} key  of the column; null = by lineage */
  _sort(key) {
    const first = key !== "name" && key !== "kind";
    if (key === null) this._order = null;
    else if (this._order?.by !== key) this._order = { by: key, down: first };
    else if (this._order.down === first) this._order = { by: key, down: !first };
    else this._order = null;
    this._columns();
    this._rows();
    if (this._order) this._grid.element.scrollTop = 0; // what is first in the order is what is looked for
    else this._grid.reveal();
  }
}

function expiry(expires, now) {
  if (expires === null) return h("span", { class: "xl-muted", title: "it stays until it is deleted" }, "never");
  const left = expires - now;
  const soon = left < SOON;
  return h("span", { class: soon ? "xl-soon" : "", title: moment(expires) }, `${soon ? "! " : ""}${left > 0 ? span(left) : "now"}`);
}
