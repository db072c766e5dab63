// The rollouts of a run on one prompt, across steps.

import { h, number } from "./looks.js";
import { oneLine } from "./visible.js";

const MOST = 400;

/**
 * @param {Record<string, any[]>} columns  of the rollouts, by step
 * @param {number} own  id of the rollout from which one came
 * @param {(row: {run: number, id: number}) => void} open
 * @returns {HTMLElement}
 */
export function kinOf(columns, own, open) {
  const count = columns.id.length;
  const rewards = columns.reward.filter((reward) => typeof reward === "number");
  const steps = columns.step;
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : [0, 1];
  const said = h("p", { class: "xl-unit xl-kin-said" });
  const plot = h("div", { class: "xl-kin", role: "listbox", "aria-label": "Rollouts on this prompt, by step" });
  const shown = Math.min(count, MOST);
  const every = count / shown;
  /** @type {HTMLElement[]} */
  const dots = [];
  for (let k = 0; k < shown; k += 1) {
    const i = Math.floor(k * every);
    const reward = typeof columns.reward[i] === "number" ? columns.reward[i] : null;
    const text = `step ${steps[i]}, sample ${columns.sample[i]}: ${reward === null ? "reward failed" : `reward ${number(reward)}`}, ${columns.length[i]} tokens, ended by ${columns.stop_reason[i]}`;
    const dot = h("button", { type: "button", class: `xl-kin-dot${columns.id[i] === own ? " xl-own" : ""}${reward === null ? " xl-lost" : ""}`, role: "option", "aria-selected": String(columns.id[i] === own), "aria-label": text, title: `${text}\n${oneLine(columns.text[i]).slice(0, 160)}`, "data-id": columns.id[i], tabindex: columns.id[i] === own || dots.length === 0 ? 0 : -1 });
    dot.style.left = `${last > first ? (100 * (steps[i] - first)) / (last - first) : 50}%`;
    dot.style.bottom = `${reward === null ? 0 : high > low ? (100 * (reward - low)) / (high - low) : 50}%`;
    dot.addEventListener("click", () => open({ run: columns.run[i], id: columns.id[i] }));
    dot.addEventListener("focus", () => (said.textContent = `${text} — ${oneLine(columns.text[i]).slice(0, 160)}`));
    dot.addEventListener("pointerenter", () => (said.textContent = `${text} — ${oneLine(columns.text[i]).slice(0, 160)}`));
    dots.push(dot);
  }
  plot.append(...dots);
  plot.addEventListener("keydown", (event) => {
    const at = dots.indexOf(/** @type {HTMLElement} */ (event.target));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: dots.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    dots[Math.max(0, Math.min(dots.length - 1, to))].focus();
  });
  said.textContent = count > shown ? `every ${number(every)}th of ${count} is shown` : "a dot is a rollout; click one to open it";
  return h(
    "div",
    { class: "xl-kin-box" },
    h("span", { class: "xl-unit xl-kin-y" }, h("span", {}, number(high)), h("span", {}, "reward"), h("span", {}, number(low))),
    plot,
    h("span", { class: "xl-unit xl-kin-x" }, h("span", {}, `step ${first}`), h("span", {}, last > first ? `step ${last}` : "")),
    said,
  );
}
