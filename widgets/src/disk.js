// What the checkpoints take on the disk, against the budget and by run.

import { h } from "./looks.js";
import { size, shown } from "./shelfwords.js";

/** Runs that have a colour of their own; the others share one. */
const SHARES = 5;
const FULL = 0.9;

export class Disk {
  constructor() {
    this._bar = h("div", { class: "xl-diskbar", role: "img" });
    this._words = h("span", { class: "xl-diskwords" });
    this._table = h("table", { class: "xl-disktable" });
    const more = h("details", { class: "xl-disk" }, h("summary", { title: "What each run takes" }, h("span", {}, "Disk"), this._bar, this._words), this._table);
    this.element = more;
  }

  /** @param {import("./lineage.js").Tree} tree */
  show(tree) {
    const { used, budget } = tree.disk;
    const shares = byRun(tree);
    const whole = Math.max(budget ?? used, used, 1);
    const full = budget !== null && used / budget >= FULL;
    const over = budget !== null && used > budget;
    this._bar.replaceChildren(
      ...shares.slice(0, SHARES).map(({ name, bytes }, i) => part(bytes / whole, `var(--xl-c${i})`, `${shown(name)}: ${size(bytes)}`)),
      part(Math.max(0, used - sum(shares.slice(0, SHARES))) / whole, "var(--xl-muted)", "the rest"),
    );
    const share = budget ? ` (${Math.round((100 * used) / budget)} %)` : "";
    const words = budget === null ? `${size(used)}, no budget set` : `${size(used)} of ${size(budget)}${share}`;
    const warning = over ? "! over the budget" : full ? "! nearly full" : "";
    this._words.replaceChildren(words, h("strong", { class: "xl-warning" }, warning && ` ${warning}`));
    this._bar.setAttribute("aria-label", `${words} ${warning}`);
    const row = ({ name, bytes, count }, i) =>
      h(
        "tr",
        {},
        h("td", {}, h("span", { class: "xl-key", "data-look": Math.min(i, SHARES) }), shown(name)),
        h("td", { class: "xl-end" }, `${count} checkpoint${count === 1 ? "" : "s"}`),
        h("td", { class: "xl-end" }, size(bytes)),
        h("td", { class: "xl-end" }, used ? `${Math.round((100 * bytes) / used)} %` : ""),
      );
    this._table.replaceChildren(h("tbody", {}, ...shares.map(row)));
  }
}

/** @param {import("./lineage.js").Tree} tree */
function byRun(tree) {
  const found = new Map();
  for (const { run, megabytes } of tree.checkpoints) {
    const share = found.get(run) ?? { name: run, bytes: 0, count: 0 };
    share.bytes += (megabytes ?? 0) * 1e6;
    share.count += 1;
    found.set(run, share);
  }
  return [...found.values()].filter((share) => share.bytes).sort((a, b) => b.bytes - a.bytes);
}

const sum = (shares) => shares.reduce((total, { bytes }) => total + bytes, 0);

function part(share, colour, title) {
  const element = h("span", { class: "xl-share", title });
  element.style.width = `${Math.max(0, 100 * share)}%`;
  element.style.background = colour;
  return element;
}
