// The same prompt under two sets of weights: token beside token, where they part, and what each
// thinks of the other's words.

import { h, number } from "./looks.js";
import { shown } from "./shelfwords.js";

/** Edges of the classes of |own − other| in nats; below the first there is no colour. */
export const EDGES = [0.1, 0.5, 1, 3];
const SIDES = /** @type {const} */ (["left", "right"]);

/**
 * Class of a difference: 0 is none, up to ±EDGES.length.
 * @param {number | null | undefined} difference  nats
 */
export function grade(difference) {
  if (difference === null || difference === undefined || Number.isNaN(difference)) return 0;
  const size = Math.abs(difference);
  const level = EDGES.filter((edge) => size >= edge).length;
  return difference < 0 ? -level : level;
}

const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${number(value)}`);

/** The colours in words and steps. @param {string} left @param {string} right */
export function legend(left, right) {
  const steps = [...EDGES.map((_, i) => i - EDGES.length), 0, ...EDGES.map((_, i) => i + 1)];
  const word = (level) => {
    if (level === 0) return `±${EDGES[0]}`;
    const edge = EDGES[Math.abs(level) - 1];
    return level < 0 ? `−${edge}` : `+${edge}`;
  };
  return h(
    "div",
    { class: "xl-scale" },
    h("span", {}, "less likely than under the other"),
    h("span", { class: "xl-steps", role: "img", "aria-label": `Colours from −${EDGES.at(-1)} to +${EDGES.at(-1)} nats` }, ...steps.map((level) => h("span", { class: "xl-token", "data-grade": level }, word(level)))),
    h("span", {}, "more likely"),
    h("span", { class: "xl-muted" }, "log-probability under its own weights minus under the other's, nats"),
    h("span", {}, h("span", { class: "xl-fork", "aria-hidden": "true" }, "◆"), " first token that differs"),
    h("span", { class: "xl-hidden" }, `Left: ${left}. Right: ${right}.`),
  );
}

/**
 * What both sides answered to one prompt.
 * @param {any} result  as of CheckpointCommands.compare
 * @param {{left: string, right: string}} names
 */
export function pair(result, names) {
  const readout = h("p", { class: "xl-readout", role: "status", "aria-live": "polite" });
  const at = result.divergence;
  const same = at === null || at === undefined;
  const columns = SIDES.map((side) => column(result[side], side, shown(names[side]), same ? null : at));
  const idle = same ? "The answers are the same." : `The answers differ from token ${at + 1} on.`;
  readout.textContent = idle;
  const body = h("div", { class: "xl-pair" }, ...columns);
  const element = h("article", { class: "xl-result" }, h("p", { class: "xl-prompt" }, shown(result.prompt)), readout, body);
  const tokens = SIDES.map((_, i) => [...columns[i].querySelectorAll(".xl-token")]);

  const point = (side, index) => {
    for (const token of body.querySelectorAll(".xl-here")) token.classList.remove("xl-here");
    if (side === null) {
      readout.textContent = idle;
      return;
    }
    for (const list of tokens) list[index]?.classList.add("xl-here");
    readout.textContent = said(result[SIDES[side]], index, shown(names[SIDES[side]]));
  };
  const find = (target) => {
    const token = target.closest?.(".xl-token");
    const side = tokens.findIndex((list) => list.includes(token));
    return side < 0 ? null : { side, index: tokens[side].indexOf(token) };
  };
  body.addEventListener("mouseover", (event) => {
    const found = find(event.target);
    if (found) point(found.side, found.index);
  });
  body.addEventListener("mouseleave", () => {
    const focused = find(document.activeElement);
    point(focused?.side ?? null, focused?.index ?? 0);
  });
  body.addEventListener("focusin", (event) => {
    const found = find(event.target);
    if (found) point(found.side, found.index);
  });
  body.addEventListener("focusout", () => point(null, 0));
  body.addEventListener("keydown", (event) => {
    const found = find(event.target);
    if (!found || event.altKey || event.ctrlKey || event.metaKey) return;
    const { side, index } = found;
    const line = tokens[side];
    const moves = {
      ArrowRight: [side, index + 1],
      ArrowLeft: [side, index - 1],
      Home: [side, 0],
      End: [side, line.length - 1],
      ArrowDown: [1 - side, index],
      ArrowUp: [1 - side, index],
      d: [side, same ? index : at],
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const list = tokens[move[0]];
    const next = list[Math.max(0, Math.min(list.length - 1, move[1]))];
    if (!next) return;
    for (const token of list) token.tabIndex = token === next ? 0 : -1;
    next.focus();
  });
  return element;
}

function column(side, where, name, at) {
  const tokens = h("div", { class: "xl-tokens", role: "group", "aria-label": `${name}: arrow keys go from token to token, D to the first that differs` });
  const keyboard = Math.min(at ?? 0, side.pieces.length - 1);
  side.pieces.forEach((piece, i) => {
    if (i === at) tokens.append(h("span", { class: "xl-fork", title: "the first token that differs" }, "◆"));
    const difference = differ(side, i);
    const token = h("span", { class: `xl-token ${at !== null && i >= at ? "xl-after" : ""}`, "data-grade": grade(difference), tabindex: i === keyboard ? 0 : -1 }, shape(piece));
    tokens.append(token);
  });
  if (at !== null && at >= side.pieces.length) tokens.append(h("span", { class: "xl-fork", title: "it ends where the other goes on" }, "◆"), h("span", { class: "xl-muted" }, " (ends here)"));
  const total = side.pieces.reduce((sum, _, i) => sum + (differ(side, i) ?? 0), 0);
  const count = side.pieces.length;
  const summary = `${count} token${count === 1 ? "" : "s"}, Σ ${signed(total)} nats`;
  return h("section", { class: `xl-side xl-${where}` }, h("h4", {}, h("span", { class: "xl-badge" }, where === "left" ? "A" : "B"), h("span", { class: "xl-name" }, name), h("span", { class: "xl-muted", title: "sum over the answer of the log-probability under its own weights minus under the other's" }, summary)), tokens);
}

/** Own minus other, nats. */
function differ(side, index) {
  const [own, other] = [side.logprobs[index], side.other[index]];
  return typeof own === "number" && typeof other === "number" ? own - other : null;
}

/** A token's text; an empty one has a shape too, and the end of a line is seen. */
const shape = (piece) => shown(piece).replaceAll("\n", "⏎\n") || "∅";

function said(side, index, name) {
  if (index >= side.pieces.length) return `${name} has no token ${index + 1}`;
  return `${name}, token ${index + 1}: ${JSON.stringify(shown(side.pieces[index]))} · own ${number(side.logprobs[index])} · other ${number(side.other[index])} · difference ${signed(differ(side, index))} nats`;
}
