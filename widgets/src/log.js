// Lines and warnings of the runs.  What they say is only ever set as text.

import { h, kindOf } from "./looks.js";

export class Log {
  constructor() {
    this._list = h("ol", { class: "xl-lines", role: "log", "aria-label": "Log", tabindex: 0 });
    this._only = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox" }));
    this._only.addEventListener("change", () => this._list.classList.toggle("xl-only", this._only.checked));
    this._count = h("span", { class: "xl-count" });
    const only = h("label", { class: "xl-check" }, this._only, "warnings only");
    this.element = h("section", { class: "xl-log", "aria-label": "Log and warnings" }, h("div", { class: "xl-head" }, h("h4", {}, "Log"), this._count, h("span", { class: "xl-fill" }), only), this._list);
    /** @type {string[]} */
    this._keys = [];
  }

  /** @param {import("./data.js").Run[]} runs */
  draw(runs) {
    const entries = runs
      .flatMap((run, r) => run.lines.map((entry) => ({ run: runs.length > 1 ? run.name : "", key: `${r}/${entry[0]}`, entry })))
      .sort((a, b) => a.entry[1] - b.entry[1]);
    const merged = joined(entries);
    const keys = merged.map((line) => `${line.key} ${line.times}`);
    let same = 0;
    while (same < keys.length && keys[same] === this._keys[same]) same += 1;
    if (same === keys.length && same === this._keys.length) return;
    const bottom = this._list.scrollHeight - this._list.scrollTop - this._list.clientHeight < 8;
    while (this._list.children.length > same) this._list.lastChild.remove();
    this._list.append(...merged.slice(same).map((line) => this._line(line)));
    this._keys = keys;
    this._count.textContent = String(entries.length);
    this.element.classList.toggle("xl-empty", entries.length === 0);
    if (bottom) this._list.scrollTop = this._list.scrollHeight;
  }

  _line({ run, times, entry: [, time, step, kind, text] }) {
    const { glyph, word } = kindOf(kind);
    const clock = time ? new Date(time * 1000).toLocaleTimeString([], { hour12: false }) : "";
    const said = word && kind !== "log" ? `${word}: ` : "";
    return h(
      "li",
      { class: `xl-line xl-of-${kind}` },
      h("time", {}, clock),
      h("span", { class: "xl-step" }, step === null || step === undefined ? "" : String(step)),
      h("span", { class: "xl-glyph", "aria-hidden": "true" }, glyph),
      h("span", { class: "xl-said" }, (run ? `${run} · ` : "") + said + text + (times > 1 ? `  ×${times}` : "")),
    );
  }
}

/**
 * Lines that say the same again and again as one with a count; the newest time and step stay.
 * @template {{run: string, key: string, entry: any[]}} T
 * @param {T[]} entries
 * @returns {(T & {times: number})[]}
 */
export function joined(entries) {
  const result = [];
  for (const line of entries) {
    const last = result[result.length - 1];
    const again = last && last.run === line.run && last.entry[3] === line.entry[3] && last.entry[4] === line.entry[4];
    if (again) result[result.length - 1] = { ...line, times: last.times + 1 };
    else result.push({ ...line, times: 1 });
  }
  return result;
}
