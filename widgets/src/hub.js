// Where the widgets of one view meet in the page.  They are separate modules and separate models,
// because only the controls may be spoken to while a cell blocks the kernel.

const HUBS = Symbol.for("xorl_lab.hubs");

/**
 * @typedef {import("./channel.js").Ask} Ask
 */

class Hub {
  constructor() {
    /** @type {{status: any, knobs: Record<string, number | null> | null, name: string} | null} */
    this.state = null;
    this._listeners = new Map();
    /** @type {Ask | null} */
    this._channel = null;
    /** @type {((ask: Ask) => void)[]} */
    this._waiting = [];
  }

  /**
   * @param {string} topic `state`: what the run does; `heads`: what the kernel has
   * @param {(value: any) => void} listener
   * @returns {() => void} what ends it
   */
  on(topic, listener) {
    const own = this._listeners.get(topic) ?? new Set();
    this._listeners.set(topic, own.add(listener));
    return () => own.delete(listener);
  }

  /**
   * @param {string} topic
   * @param {any} value
   */
  tell(topic, value) {
    if (topic === "state") this.state = value;
    for (const listener of this._listeners.get(topic) ?? []) listener(value);
  }

  /** @param {Ask | null} channel */
  connect(channel) {
    this._channel = channel;
    if (channel) for (const go of this._waiting.splice(0)) go(channel);
  }

  /**
   * Ask the kernel something; waits until there is a channel.
   * @param {Record<string, unknown>} content
   */
  async ask(content) {
    const channel = this._channel ?? (await new Promise((go) => this._waiting.push(go)));
    return channel(content);
  }
}

/**
 * The meeting place of a group of widgets.
 * @param {string} group
 * @returns {Hub}
 */
export function hubOf(group) {
  /** @type {Map<string, Hub>} */
  const hubs = (globalThis[HUBS] ??= new Map());
  if (!hubs.has(group)) hubs.set(group, new Hub());
  return hubs.get(group);
}

/** @param {string} group */
export function forget(group) {
  globalThis[HUBS]?.delete(group);
}
