// Everything that is known of the selected row.

import { h, number, stateOf } from "./looks.js";
import { resumable, written } from "./lineage.js";
import { breaking, moment, size, span, shown } from "./shelfwords.js";

/**
 * @param {import("./lineage.js").Lineage} lineage
 * @param {import("./lineage.js").Node} node
 * @param {number} now  seconds since the epoch
 * @returns {HTMLElement[]}
 */
export function details(lineage, node, now) {
  if (node.kind === "gone") return [h("p", {}, `${shown(node.name)} was deleted; what was branched off it stays.`)];
  if (node.kind === "run") return [facts(run(node))];
  if (!node.checkpoint) return [h("p", {}, "The base model, as it was before any training: to sample from and to compare with.")];
  return [
    section("Checkpoint", facts(checkpoint(lineage, node, now))),
    section("Metrics when it was saved", metrics(lineage, node)),
    section("Settings", settings(lineage, node)),
  ];
}

/** @returns {[string, string][]} */
function run(node) {
  const own = node.children.filter((child) => child.checkpoint);
  const bytes = own.reduce((total, child) => total + (child.checkpoint.megabytes ?? 0) * 1e6, 0);
  const state = node.run.state ? stateOf(node.run.state) : null;
  return [
    ["run", node.name],
    ["kind", node.run.kind || "–"],
    ["state", state ? `${state.glyph} ${state.text}` : "–"],
    ["model", node.run.model || "–"],
    ["comes from", node.run.parent ?? "base"],
    ["checkpoints", `${own.length}, ${size(bytes)}`],
  ];
}

/** @returns {[string, string][]} */
function checkpoint(lineage, node, now) {
  const { checkpoint, run } = node;
  const branches = lineage.branches(node).map((branch) => branch.name);
  const left = checkpoint.expires === null ? "" : checkpoint.expires - now;
  const expires = checkpoint.expires === null ? "never" : `${moment(checkpoint.expires)}, ${left > 0 ? `in ${span(left)}` : "now"}`;
  return [
    ["name", checkpoint.name],
    ["run", run?.state ? `${run.name}, ${stateOf(run.state).text}` : checkpoint.run],
    ["step", checkpoint.step === null ? "–" : String(checkpoint.step)],
    ["kind", `${checkpoint.kind}; ${resumable(checkpoint) ? "training can go on from it" : "saved for sampling only"}`],
    ["comes from", checkpoint.parent ?? "base"],
    ["branched off", branches.length ? branches.join(", ") : "nothing"],
    ["size", size(checkpoint.megabytes * 1e6)],
    ["saved", moment(checkpoint.created)],
    ["expires", expires],
    ...(checkpoint.held ? [/** @type {[string, string]} */ (["kept because", checkpoint.held])] : []),
  ];
}

/** @param {[string, string][]} pairs */
function facts(pairs) {
  return h("dl", { class: "xl-facts" }, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, shown(value))]));
}

const section = (title, content) => h("section", {}, h("h4", {}, title), content);

function metrics(lineage, node) {
  const parent = node.checkpoint.parent === null ? null : lineage.named(node.checkpoint.parent)?.checkpoint;
  const names = lineage.tree.metrics.filter((name) => name in node.checkpoint.metrics);
  if (!names.length) return h("p", { class: "xl-muted" }, "none were measured");
  const rows = names.map((name) => {
    const value = node.checkpoint.metrics[name];
    const before = parent?.metrics[name];
    const change = typeof value === "number" && typeof before === "number" ? value - before : null;
    const said = change === null || change === 0 ? "" : `${change > 0 ? "+" : ""}${number(change)}`;
    return h("tr", {}, h("th", { scope: "row" }, breaking(name)), h("td", { class: "xl-end" }, number(value)), h("td", { class: "xl-end xl-muted" }, said));
  });
  const head = parent ? [h("tr", { class: "xl-muted" }, h("td", {}), h("td", {}), h("td", { class: "xl-end" }, "change"))] : [];
  return h("table", { class: "xl-values" }, h("tbody", {}, ...head, ...rows));
}

function settings(lineage, node) {
  const own = lineage.settings(node.checkpoint);
  const parent = node.checkpoint.parent === null ? null : lineage.named(node.checkpoint.parent)?.checkpoint;
  const before = parent ? lineage.settings(parent) : null;
  const names = [...new Set([...Object.keys(own), ...Object.keys(before ?? {})])];
  if (!names.length) return h("p", { class: "xl-muted" }, "not recorded");
  const differs = (name) => before !== null && written(own[name]) !== written(before[name]);
  names.sort((a, b) => Number(differs(b)) - Number(differs(a)));
  const rows = names.map((name) => {
    const changed = differs(name);
    const was = changed ? `≠ was ${written(before[name]) || "not set"}` : "";
    return h("tr", { class: changed ? "xl-changed" : "" }, h("th", { scope: "row" }, shown(name)), h("td", {}, shown(written(own[name]) || "not set")), h("td", {}, shown(was)));
  });
  return h("table", { class: "xl-values" }, h("tbody", {}, ...rows));
}
