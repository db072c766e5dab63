// Answers an inspector out of a file, as xorl_lab/widgets/findings.py does out of a store.

const KEPT_SCALARS = ["step", "group", "n", "matches", "failed", "reward:mean", "reward:std", "reward:min", "reward:max", "spread", "length:mean"];
const TESTS = {
  "=": (a, b) => a === b,
  "!=": (a, b) => a !== b && a !== null,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
  has: (a, b) => (a ?? []).includes(b),
  contains: (a, b) => String(a ?? "").toLowerCase().includes(String(b).toLowerCase()),
};

/**
 * @param {{setup: any, scalars: string[], columns: Record<string, any[]>, rollouts: {content: any, buffers: string[]}[]}} snapshot
 * @returns {(content: any) => {content: any, buffers: DataView[]}}
 */
export function answererOf(snapshot) {
  const { columns, scalars, setup } = snapshot;
  const count = columns.id.length;
  const row = (i) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]]));
  const rows = Array.from({ length: count }, (_, i) => row(i));
  /** @type {any[]} */
  let found = [];

  const meets = (one, { where = [], search = "" }) =>
    where.every(([name, operator, value]) => {
      const own = name === "failed" ? Number(one.failed) : (one[name] ?? null);
      return own === null && operator !== "=" ? false : TESTS[operator](own, value);
    }) && (!search || TESTS.contains(one.text, search) || TESTS.contains(one.prompt, search));

  const sorted = (list, { order_by: name, descending }) => {
    // As recorded: by step first, since several runs have no common clock.
    const keys = name === "id" ? ["step", "id"] : [name];
    const compare = (a, b) => {
      for (const key of keys) {
        const [left, right] = [a[key] ?? null, b[key] ?? null];
        if (left === right) continue;
        if (left === null || right === null) return left === null ? 1 : -1;
        return (left < right ? -1 : 1) * (descending ? -1 : 1);
      }
      return 0;
    };
    return [...list].sort(compare);
  };

  const grouped = (list) => {
    const groups = new Map();
    for (const one of rows) {
      const key = `${one.run}/${one.step}/${one.group}`;
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    const wanted = new Set(list.map((one) => `${one.run}/${one.step}/${one.group}`));
    return [...groups].filter(([key]) => wanted.has(key)).map(([, own]) => summary(own, list));
  };

  const table = (list) => (list.length ? Object.fromEntries(Object.keys(list[0]).map((name) => [name, list.map((one) => one[name])])) : { id: [], run: [] });

  const answers = {
    hello: () => ({}),
    changed: ({ version }) => ({ version }),
    query: (content) => {
      const list = rows.filter((one) => meets(one, content));
      found = sorted(content.grouped ? grouped(list) : list, content);
      return { key: 1, count: found.length, rollouts: list.length, version: 0, columns: scalars, group_columns: KEPT_SCALARS };
    },
    page: ({ start, count: size }) => {
      const some = found.slice(start, start + size);
      const own = some.flatMap((one) => one.own ?? []);
      return { start, columns: table(some.map(({ own: _, ...one }) => one)), ...(own.length ? { rollouts: table(own) } : {}) };
    },
    same: ({ run, rollout: id }) => {
      const one = rows.find((other) => other.run === run && other.id === id);
      return { columns: table(sorted(rows.filter((other) => other.same === one.same), { order_by: "id", descending: false })) };
    },
    weights: () => ({ weights: [] }),
  };

  return (content) => {
    if (content.kind === "rollout") {
      const at = rows.findIndex((one) => one.run === content.run && one.id === content.rollout);
      if (at < 0) return { content: { error: "this rollout is not in the file" }, buffers: [] };
      const { content: answer, buffers } = snapshot.rollouts[at];
      return { content: answer, buffers: buffers.map((text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer)) };
    }
    return { content: answers[content.kind]?.(content) ?? { error: setup.reason }, buffers: [] };
  };
}

/** A group at a glance. */
function summary(own, list) {
  const rewards = own.map((one) => one.reward).filter((reward) => typeof reward === "number");
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const some = (value) => (rewards.length ? value : null);
  const { run, step, group, prompt } = own[0];
  return {
    run, step, group, prompt, own,
    ids: own.map((one) => one.id),
    n: own.length,
    matches: own.filter((one) => list.includes(one)).length,
    failed: own.filter((one) => one.failed).length,
    "reward:mean": some(mean),
    "reward:std": some(Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length)),
    "reward:min": some(low),
    "reward:max": some(high),
    spread: some(high - low),
    "length:mean": own.reduce((sum, one) => sum + one.length, 0) / own.length,
  };
}
