// What the columns of the table are called, and how wide and in which form they are.

import { number } from "./looks.js";

const KNOWN = {
  id: { title: "id", width: 60 },
  run: { title: "run", width: 110, words: true },
  step: { title: "step", width: 48 },
  group: { title: "group", width: 54 },
  sample: { title: "sample", width: 68 },
  reward: { title: "reward", width: 68 },
  advantage: { title: "advantage", width: 82, signed: true },
  length: { title: "tokens", width: 58 },
  prompt_length: { title: "prompt tokens", width: 112 },
  "mean:logprobs": { title: "mean logprob", width: 108 },
  version: { title: "version", width: 70 },
  stop_reason: { title: "ended by", width: 68, words: true },
  failed: { title: "failed", width: 64 },
  text: { title: "completion", width: 0, words: true, text: true },
  prompt: { title: "prompt", width: 0, words: true, text: true },
  error: { title: "error", width: 180, words: true, text: true },
  tags: { title: "tags", width: 66, words: true, text: true },
  note: { title: "note", width: 140, words: true, text: true },
  n: { title: "rollouts", width: 66 },
  matches: { title: "matching", width: 82 },
  spread: { title: "spread", width: 72 },
  "reward:mean": { title: "mean reward", width: 96 },
  "reward:std": { title: "std", width: 58 },
  "reward:min": { title: "least", width: 70 },
  "reward:max": { title: "greatest", width: 78 },
  "length:mean": { title: "mean tokens", width: 102 },
  rewards: { title: "rewards", width: 130, words: true, text: true },
};

/** Texts that are in every table of rollouts, beside its scalars. */
export const TEXTS = ["tags", "note", "error", "prompt", "text"];
export const ROLLOUTS = ["step", "reward", "advantage", "length", "stop_reason", "tags", "text"];
export const GROUPS = ["step", "group", "n", "reward:mean", "reward:std", "rewards", "prompt"];

/**
 * @param {string} name
 * @returns {{name: string, title: string, width: number, words: boolean, text: boolean, signed: boolean}}
 */
export function columnOf(name) {
  const found = KNOWN[name];
  const base = { name, words: false, text: false, signed: false };
  if (found) return { ...base, ...found };
  const title = name.replace(/^reward:part:/, "").replace(/^mean:/, "mean ").replace(/_/g, " ");
  return { ...base, title, width: Math.max(70, 30 + 7 * title.length) };
}

/**
 * What stands in a cell.
 * @param {ReturnType<typeof columnOf>} column
 * @param {any} value
 */
export function cellText(column, value) {
  if (column.name === "failed") return value ? "✕ failed" : "";
  if (Array.isArray(value)) return value.join(" ");
  if (value === null || value === undefined) return column.words ? "" : "–";
  if (typeof value === "string") return value;
  return column.signed && value > 0 ? `+${number(value)}` : number(value);
}
