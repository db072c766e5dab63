// Checkpoints as rows: by lineage, indented below what they come from, or as a list in some order.

/**
 * @typedef {{name: string, run: string, step: number | null, kind: string, parent: string | null, megabytes: number, created: number | null, expires: number | null, metrics: Record<string, number | null>, settings: number, held: string}} Checkpoint
 * @typedef {{name: string, kind: string, state: string, parent: string | null, model: string}} RunEntry
 * @typedef {{checkpoints: Checkpoint[], settings: Record<string, any>[], runs: RunEntry[], disk: {used: number, budget: number | null}, metrics: string[], main: string[]}} Tree
 * @typedef {{key: string, kind: "base" | "run" | "checkpoint" | "gone", name: string, label: string, checkpoint: Checkpoint | null, run: RunEntry | null, children: Node[], parent: Node | null, hay: string}} Node
 * @typedef {{node: Node, level: number, guides: boolean[], at: number, of: number, expanded: boolean | null, label: string}} Row
 */

export const BASE = "base";

/** True if training can go on from it. @param {Checkpoint} checkpoint */
export const resumable = (checkpoint) => !checkpoint.kind.includes("sampl");

export class Lineage {
  /** @param {Tree} tree */
  constructor(tree) {
    this.tree = tree;
    /** @type {Map<string, Node>} */
    this.nodes = new Map();
    const base = tree.checkpoints.find((c) => c.name === BASE) ?? null;
    this.root = this._node("base", BASE, BASE, base, null);
    for (const run of tree.runs) this._node("run", run.name, run.name, null, run);
    this._checkpoints(tree.checkpoints.filter((c) => c !== base));
    for (const node of [...this.nodes.values()]) if (node.kind === "run") this._origin(node).adopt(node);
    this._untie();
  }

  /** The settings that a checkpoint was trained with. @param {Checkpoint | null} checkpoint */
  settings(checkpoint) {
    return (checkpoint && this.tree.settings[checkpoint.settings]) || {};
  }

  /** What can be sampled from. */
  names() {
    return [BASE, ...[...this.nodes.values()].filter((n) => n.kind === "checkpoint").map((n) => n.name)];
  }

  /** @param {string} name @returns {Node | null} */
  named(name) {
    if (name === BASE) return this.root;
    return this.nodes.get(`checkpoint ${name}`) ?? null;
  }

  /** Runs that were branched off a checkpoint. @param {Node} node */
  branches(node) {
    return node.children.filter((child) => child.kind === "run");
  }

  /**
   * The rows to show, by lineage.
   * @param {Set<string>} closed  keys of the nodes whose children are hidden
   * @param {string} filter
   * @returns {Row[]}
   */
  rows(closed, filter) {
    const wanted = words(filter);
    const kept = wanted.length ? this._kept(wanted) : null;
    const rows = [];
    /** @type {[Node, boolean[], number, number][]} */
    const open = [[this.root, [], 1, 1]];
    while (open.length) {
      const [node, guides, at, of] = open.pop();
      const children = kept ? node.children.filter((child) => kept.has(child)) : node.children;
      const expanded = children.length ? Boolean(kept) || !closed.has(node.key) : null;
      rows.push({ node, level: guides.length + 1, guides, at, of, expanded, label: node.label });
      if (!expanded) continue;
      for (let i = children.length - 1; i >= 0; i -= 1) {
        open.push([children[i], [...guides, i < children.length - 1], i + 1, children.length]);
      }
    }
    return kept && kept.size === 0 ? [] : rows;
  }

  /**
   * The checkpoints in an order; those without a value come last either way.
   * @param {{by: string, down: boolean}} order
   * @param {string} filter
   * @returns {Row[]}
   */
  list({ by, down }, filter) {
    const wanted = words(filter);
    const value = measure(by);
    const found = [...this.nodes.values()].filter((node) => node.checkpoint && node !== this.root && this._fits(node, wanted));
    const keyed = found.map((node) => ({ node, value: value(node.checkpoint) }));
    keyed.sort((a, b) => {
      if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
      const order = typeof a.value === "string" ? a.value.localeCompare(b.value, undefined, { numeric: true }) : a.value - b.value;
      return down ? -order : order;
    });
    return keyed.map(({ node }, i) => ({ node, level: 1, guides: [], at: i + 1, of: keyed.length, expanded: null, label: node.name }));
  }

  /** @returns {Node & {adopt: (child: Node) => void}} */
  _node(kind, name, label, checkpoint, run) {
    let key = `${kind} ${name}`;
    while (this.nodes.has(key)) key += " again"; // saved twice under one name: to resume, and to sample
    const node = {
      key,
      kind,
      name,
      label,
      checkpoint,
      run,
      children: [],
      parent: null,
      hay: "",
      adopt(child) {
        child.parent = node;
        node.children.push(child);
      },
    };
    this.nodes.set(node.key, node);
    return node;
  }

  _checkpoints(checkpoints) {
    const late = (c) => [c.step ?? Infinity, c.created ?? Infinity];
    const ordered = [...checkpoints].sort((a, b) => {
      const [[s, t], [u, v]] = [late(a), late(b)];
      return s === u ? (t === v ? 0 : t - v) : s - u;
    });
    for (const checkpoint of ordered) {
      const label = checkpoint.name.startsWith(`${checkpoint.run}/`) ? checkpoint.name.slice(checkpoint.run.length + 1) : checkpoint.name;
      const node = this._node("checkpoint", checkpoint.name, label, checkpoint, null);
      const home = this.nodes.get(`run ${checkpoint.run}`) ?? this._node("run", checkpoint.run, checkpoint.run, null, { name: checkpoint.run, kind: "", state: "", parent: null, model: "" });
      node.run = home.run;
      home.adopt(node);
    }
  }

  /** What a run begins from: a checkpoint, one that is gone, or the base model. */
  _origin(node) {
    const name = node.run.parent;
    if (!name || name === BASE) return this.root;
    const known = this.nodes.get(`checkpoint ${name}`) ?? this.nodes.get(`gone ${name}`);
    if (known) return known;
    const cut = name.lastIndexOf("/");
    const home = this.nodes.get(`run ${name.slice(0, cut)}`);
    const gone = this._node("gone", name, home ? name.slice(cut + 1) : name, null, home?.run ?? null);
    if (!home) {
      this.root.adopt(gone);
      return gone;
    }
    const step = Number(name.match(/(\d+)$/)?.[1] ?? NaN);
    const before = home.children.findIndex((child) => (child.checkpoint?.step ?? -1) > step);
    home.adopt(gone);
    if (before >= 0) home.children.splice(before, 0, home.children.pop());
    return gone;
  }

  /** Runs that are said to come from one another hang on the root, so that all are seen. */
  _untie() {
    const seen = new Set();
    const walk = (start) => {
      const open = [start];
      while (open.length) {
        const node = open.pop();
        if (seen.has(node)) continue;
        seen.add(node);
        open.push(...node.children);
      }
    };
    walk(this.root);
    for (const node of this.nodes.values()) {
      if (node.kind !== "run" || seen.has(node)) continue;
      node.parent.children.splice(node.parent.children.indexOf(node), 1);
      /** @type {any} */ (this.root).adopt(node);
      walk(node);
    }
  }

  _kept(wanted) {
    const kept = new Set();
    for (const node of this.nodes.values()) {
      if (!this._fits(node, wanted)) continue;
      for (let at = node; at && !kept.has(at); at = at.parent) kept.add(at);
    }
    return kept;
  }

  _fits(node, wanted) {
    if (!wanted.length) return true;
    node.hay ||= this._hay(node);
    return wanted.every((word) => node.hay.includes(word));
  }

  _hay(node) {
    const { checkpoint, run } = node;
    const said = [node.name];
    if (checkpoint) said.push(resumable(checkpoint) ? "resumable" : "sampling only");
    if (run) said.push(run.state, run.kind);
    for (const [name, value] of Object.entries(this.settings(checkpoint))) said.push(`${name}=${written(value)}`);
    return said.join("\n").toLowerCase();
  }
}

/** A setting as one would type it. @param {any} value */
export function written(value) {
  if (typeof value === "string") return value;
  if (typeof value === "number" && value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) {
    return value.toExponential().replace("e+", "e");
  }
  return JSON.stringify(value) ?? "";
}

const words = (filter) => filter.toLowerCase().split(/\s+/).filter(Boolean);

/** @param {string} by @returns {(checkpoint: Checkpoint) => any} */
function measure(by) {
  if (by === "kind") return (c) => (resumable(c) ? "resumable" : "sampling only");
  if (by.startsWith("metric ")) return (c) => c.metrics[by.slice(7)] ?? null;
  return (c) => c[by] ?? null;
}
