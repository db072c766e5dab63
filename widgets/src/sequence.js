// Tokens of one text with their values, as xorl_lab/widgets/tokens.py sends them.

const TYPES = { i4: Int32Array, f4: Float32Array, u1: Uint8Array };
// A byte order mark is a character like others here.
const DECODER = new TextDecoder("utf-8", { ignoreBOM: true });

/**
 * @param {[string, "i4" | "f4" | "u1"][]} heads
 * @param {DataView[]} buffers
 * @param {number} first  of the buffers that are meant
 * @returns {Record<string, any>}
 */
export function arraysOf(heads, buffers, first = 0) {
  const found = {};
  heads.forEach(([name, type], i) => {
    const view = buffers[first + i];
    const Type = TYPES[type];
    const { buffer, byteOffset, byteLength } = view;
    const aligned = byteOffset % Type.BYTES_PER_ELEMENT === 0;
    found[name] = aligned ? new Type(buffer, byteOffset, byteLength / Type.BYTES_PER_ELEMENT) : new Type(buffer.slice(byteOffset, byteOffset + byteLength));
  });
  return found;
}

/** @param {Uint8Array} bytes */
export function decoded(bytes) {
  return DECODER.decode(bytes);
}

/** Where each piece begins, and the end of the last. */
function edges(sizes, count) {
  const found = new Int32Array(count + 1);
  for (let i = 0; i < count; i += 1) found[i + 1] = found[i] + (sizes ? sizes[i] : 1);
  return found;
}

export class Sequence {
  /**
   * @param {Record<string, any>} arrays
   * @param {{prefix?: string, special?: number[], alternatives?: number, advantage?: number | null}} [more]
   */
  constructor(arrays, { prefix = "", special = [], alternatives = 0, advantage = null } = {}) {
    /** @type {Int32Array} */
    this.ids = arrays[`${prefix}tokens`];
    this.count = this.ids.length;
    this.spelled = `${prefix}bytes` in arrays;
    this.advantage = advantage;
    /** @type {Record<string, Float32Array>} */
    this.values = {};
    if (!prefix) {
      for (const [name, values] of Object.entries(arrays)) if (name.startsWith("value:")) this.values[name.slice(6)] = values;
    }
    this._special = new Set(special);
    this._width = prefix ? 0 : alternatives;
    this._arrays = arrays;
    /** @type {Map<number, Uint8Array> | null} */
    this._vocabulary = null;
    if (this.spelled) {
      this._bytes = arrays[`${prefix}bytes`];
      this._offsets = edges(arrays[`${prefix}sizes`], this.count);
      this._starts = arrays[`${prefix}units`];
      this.units = this._starts.length;
      this._chars = edges(arrays[`${prefix}chars`], this.units);
      this.text = decoded(this._bytes);
    } else {
      this.units = this.count;
      this.text = "";
    }
  }

  /** Index of the first token of a unit; of the one behind the last, the number of tokens. */
  start(unit) {
    if (unit >= this.units) return this.count;
    return this._starts ? this._starts[unit] : unit;
  }

  /** The unit that a token is a part of. */
  unitOf(token) {
    if (!this._starts) return token;
    let low = 0;
    let high = this.units - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this._starts[middle] <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Text of a unit; of tokens that nothing can spell, their id. */
  textOf(unit) {
    if (!this.spelled) return String(this.ids[unit]);
    return this.text.slice(this._chars[unit], this._chars[unit + 1]);
  }

  /** Length of the text of units. */
  lengthOf(from, to) {
    return this.spelled ? this._chars[to] - this._chars[from] : 6 * (to - from);
  }

  /** Bytes of a token, or null. */
  piece(token) {
    return this.spelled ? this._bytes.subarray(this._offsets[token], this._offsets[token + 1]) : null;
  }

  isSpecial(token) {
    return this._special.has(this.ids[token]);
  }

  /** Whether an environment wrote the token, which the model only read. */
  isRead(token) {
    return this.values.weights?.[token] === 0;
  }

  /** How many tokens the model drew. */
  get drawn() {
    return this.values.weights ? this.values.weights.reduce((sum, weight) => sum + (weight === 0 ? 0 : 1), 0) : this.count;
  }

  /** In how many turns it drew them. */
  get turns() {
    let found = 0;
    for (let token = 0; token < this.count; token += 1) if (!this.isRead(token) && (token === 0 || this.isRead(token - 1))) found += 1;
    return found;
  }

  /** What the sampler made of the position: bits 1 clipped, 2 masked, 4 weight cut. */
  flags(token) {
    const value = this.values.flags?.[token];
    return value > 0 ? Math.round(value) : 0;
  }

  /** The most likely tokens at a position, the best first. */
  alternatives(token) {
    const found = [];
    for (let k = 0; k < this._width; k += 1) {
      const id = this._arrays.top_ids?.[token * this._width + k] ?? -1;
      if (id >= 0) found.push({ id, logprob: this._arrays.top_logprobs[token * this._width + k], piece: this._pieceOf(id), special: this._special.has(id) });
    }
    return found.sort((a, b) => b.logprob - a.logprob);
  }

  /** How many tokens are the same as those of another text, from the start. */
  shared(other, skip = 0) {
    const most = Math.min(this.count - skip, other.count);
    let same = 0;
    while (same < most && this.ids[skip + same] === other.ids[same]) same += 1;
    return same;
  }

  _pieceOf(id) {
    if (!this._vocabulary) {
      this._vocabulary = new Map();
      const { vocabulary_tokens: tokens, vocabulary_sizes: sizes, vocabulary_bytes: bytes } = this._arrays;
      if (tokens) {
        let at = 0;
        tokens.forEach((token, i) => {
          this._vocabulary.set(token, bytes.subarray(at, at + sizes[i]));
          at += sizes[i];
        });
      }
    }
    return this._vocabulary.get(id) ?? null;
  }
}
