// Stand-ins for a notebook's model and for the canvas, and runs to show.

import { plots } from "../src/chart.js";

/** @param {number[]} steps @param {Record<string, number[]>} columns */
export function wire(steps, columns) {
  const names = Object.keys(columns);
  const buffer = new ArrayBuffer(4 * steps.length * (names.length + 1));
  new Int32Array(buffer, 0, steps.length).set(steps);
  names.forEach((name, k) => new Float32Array(buffer, 4 * steps.length * (k + 1), steps.length).set(columns[name]));
  return new DataView(buffer);
}

/** @param {number[]} steps @param {Record<string, number[]>} columns @param {object} [more] */
export function snapshotOf(steps, columns, more = {}) {
  return {
    id: "1",
    name: "a run",
    kind: "grpo",
    model: "tiny",
    created: 0,
    parent: null,
    names: Object.keys(columns),
    rows: steps.length,
    data: wire(steps, columns),
    exact: 0,
    status: { state: "running", step: steps.at(-1) ?? 0, total: 10, message: "", seconds: 12, left: 60 },
    lines: [],
    marks: [],
    ...more,
  };
}

export const panel = (key, names, more = {}) => ({
  key,
  title: key,
  unit: "",
  section: "main",
  share: false,
  lines: names.map((name) => ({ name, label: name, shape: "line", spread: null, low: null, high: null })),
  ...more,
});

/** A model as anywidget hands it to a module. */
export class FakeModel {
  constructor(values) {
    this.values = values;
    this.listeners = new Map();
    this.sent = [];
  }

  get(name) {
    return this.values[name];
  }

  on(event, listener) {
    this.listeners.set(event, [...(this.listeners.get(event) ?? []), listener]);
  }

  off(event, listener) {
    this.listeners.set(event, (this.listeners.get(event) ?? []).filter((l) => l !== listener));
  }

  send(content) {
    this.sent.push(content);
  }

  /** As if the kernel had said it. */
  hear(content, buffers = []) {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(content, buffers);
  }

  change(name, value) {
    this.values[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  }
}

/** A plot that records what it is told; valToPos is the identity. */
export function fakePlots() {
  const made = [];
  plots.create = (options, data, target) => {
    const plot = {
      options,
      data,
      target,
      width: options.width,
      height: options.height,
      cursor: { idx: null, left: -10 },
      destroyed: false,
      setData(fresh) {
        this.data = fresh;
      },
      setSize() {},
      setCursor(at) {
        this.at = at.left;
      },
      valToPos: (value) => value,
      destroy() {
        this.destroyed = true;
      },
    };
    made.push(plot);
    return plot;
  };
  return made;
}

/** Every element is visible and 300 pixels wide. */
export function fakeLayout() {
  globalThis.ResizeObserver = class {
    observe() {}
    disconnect() {}
  };
  globalThis.IntersectionObserver = class {
    constructor(callback) {
      this.callback = callback;
    }
    observe(target) {
      queueMicrotask(() => this.callback([{ target, isIntersecting: true }]));
    }
    disconnect() {}
  };
  Object.defineProperty(HTMLElement.prototype, "clientWidth", { configurable: true, get: () => 300 });
}

export const frame = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go, 0)));
