// What is known of a rollout as a whole, and what a person writes about it.

import { h, number } from "./looks.js";
import { oneLine, visible } from "./visible.js";

const ENDS = { stop: "stopped by itself", length: "cut off at max_tokens", abort: "given up" };

/**
 * @param {any} facts
 * @param {string} run  its name, empty where there is one run only
 */
export function title(facts, run) {
  return `${run ? `${oneLine(run)} · ` : ""}step ${facts.step} · group ${facts.group} · sample ${facts.sample}`;
}

/** @param {any} facts @param {import("./sequence.js").Sequence} sequence */
export function factsOf(facts, sequence) {
  const parts = Object.entries(facts.reward_parts ?? {});
  const pairs = [
    ["reward", facts.reward === null ? "failed" : number(Number(facts.reward)), "xl-main"],
    ...parts.map(([name, value]) => [oneLine(name), number(value === null ? null : Number(value)), "xl-part"]),
    ["advantage", facts.advantage > 0 ? `+${number(facts.advantage)}` : number(facts.advantage), ""],
    ["tokens", number(sequence.drawn), ""],
    ...(sequence.values.weights ? [["turns", number(sequence.turns), ""]] : []),
    ["ended", ENDS[facts.stop_reason] ?? facts.stop_reason, facts.stop_reason === "length" ? "xl-warned" : ""],
    ["version", String(facts.version), ""],
    ["id", String(facts.id), ""],
  ];
  const list = h("ul", { class: "xl-facts" }, ...pairs.map(([name, value, look]) => h("li", { class: look }, h("span", { class: "xl-unit" }, `${name} `), h("b", {}, value))));
  const row = Object.entries(facts.row ?? {});
  const box = h("div", { class: "xl-about-rollout" }, list);
  if (facts.error) box.append(h("p", { class: "xl-error" }, h("b", {}, sequence.values.weights ? "The environment: " : "The reward function: "), ...signs(facts.error)));
  if (row.length) box.append(h("p", { class: "xl-row-of" }, ...row.flatMap(([name, value]) => [h("span", { class: "xl-unit" }, `${oneLine(name)} `), h("code", {}, oneLine(typeof value === "string" ? value : JSON.stringify(value))), " "])));
  return box;
}

function signs(text) {
  return visible(text, false).map((part) => (part.mark ? h("i", { class: "xl-sign", title: part.title ?? null }, part.text.replace("↵\n", " ↵\n")) : part.text));
}

/**
 * Fields for tags and a note, saved when they are left.
 * @param {any} facts
 * @param {(change: {tags?: string[], note?: string}) => Promise<string>} save  resolves to what went wrong, empty if nothing did
 */
export function notesOf(facts, save) {
  const tags = /** @type {HTMLInputElement} */ (h("input", { type: "text", class: "xl-tags-field", placeholder: "add tags", autocomplete: "off", spellcheck: "false", "aria-label": "Tags, with a space between them" }));
  const note = /** @type {HTMLTextAreaElement} */ (h("textarea", { rows: 1, class: "xl-note-field", placeholder: "add a note", "aria-label": "Note" }));
  const said = h("span", { class: "xl-unit", role: "status", "aria-live": "polite" });
  tags.value = (facts.tags ?? []).join(" ");
  note.value = facts.note ?? "";
  let kept = { tags: tags.value, note: note.value };
  const keep = async () => {
    const now = { tags: tags.value.trim(), note: note.value };
    if (now.tags === kept.tags && now.note === kept.note) return;
    const words = now.tags.split(/[\s,]+/).filter(Boolean);
    said.textContent = "saving …";
    const wrong = await save({ tags: words, note: now.note });
    said.className = wrong ? "xl-bad" : "xl-unit";
    said.textContent = wrong || "saved";
    if (!wrong) kept = now;
  };
  for (const element of [tags, note]) {
    element.addEventListener("change", keep);
    element.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && (element === tags || event.ctrlKey || event.metaKey)) keep();
    });
  }
  return h("div", { class: "xl-notes" }, h("label", {}, h("span", { class: "xl-unit" }, "tags"), tags), h("label", { class: "xl-grow" }, h("span", { class: "xl-unit" }, "note"), note), said);
}
