// Rows of an answer, asked for page by page as they come into view.

const PAGE = 100;
/** Pages that are held; those not looked at for longest go first. */
const KEPT = 60;

export class Rows {
  /**
   * @param {(content: Record<string, unknown>) => Promise<{content: any}>} ask
   * @param {() => void} came  rows are there that were not
   */
  constructor(ask, came) {
    this._ask = ask;
    this._came = came;
    this.key = 0;
    this.count = 0;
    /** @type {Map<number, any>} */
    this._pages = new Map();
    this._open = new Set();
    /** @type {number[]} */
    this._wanted = [];
    this.lost = () => {};
  }

  /** Begin with another answer. */
  reset(key, count) {
    this.key = key;
    this.count = count;
    this._pages.clear();
    this._open.clear();
    this._wanted = [];
  }

  /** A row by column, or null while it is on its way. */
  at(index) {
    const number = Math.floor(index / PAGE);
    const page = this._pages.get(number);
    if (!page) return null;
    return rowOf(page.columns, index - number * PAGE);
  }

  /** The rollouts of a row of groups. */
  rollouts(index) {
    const page = this._pages.get(Math.floor(index / PAGE));
    if (!page?.rollouts) return [];
    page.places ??= new Map(page.rollouts.id.map((id, i) => [`${page.rollouts.run[i]}/${id}`, i]));
    const group = this.at(index);
    return group.ids.map((id) => rowOf(page.rollouts, page.places.get(`${group.run}/${id}`)));
  }

  /**
   * Rows that should be there; what was wished for before and is not under way is dropped.
   * @param {number} from
   * @param {number} to
   */
  want(from, to) {
    this._wanted = [];
    for (let page = Math.max(0, Math.floor(from / PAGE)); page * PAGE < Math.min(to, this.count); page += 1) {
      const found = this._pages.get(page);
      if (found) {
        this._pages.delete(page);
        this._pages.set(page, found);
      } else if (!this._open.has(page)) this._wanted.push(page);
    }
    this._next();
  }

  /** A row, waited for. */
  async get(index) {
    if (index < 0 || index >= this.count) return null;
    if (!this.at(index)) await this._load(Math.floor(index / PAGE));
    return this.at(index);
  }

  _next() {
    while (this._open.size < 2 && this._wanted.length) this._load(this._wanted.shift());
  }

  async _load(page) {
    const { key } = this;
    this._open.add(page);
    const { content } = await this._ask({ kind: "page", key, start: page * PAGE, count: PAGE });
    if (key !== this.key) return;
    this._open.delete(page);
    if (content.error) {
      this.lost(content.error);
      return;
    }
    this._pages.set(page, content);
    if (this._pages.size > KEPT) this._pages.delete(this._pages.keys().next().value);
    this._came();
    this._next();
  }
}

function rowOf(columns, i) {
  const row = {};
  for (const name in columns) row[name] = columns[name][i];
  return row;
}
