// Colours, dashes and words: what every part of the view draws with.

/** Okabe and Ito's palette, as in xorl_lab/widgets/colours.py (a test compares the two). */
export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"];
/** The same palette for a dark page, its lighter colours first; style.css has both too. */
export const COLOURS_DARK = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00"];
/** The second cue: strokes and gaps in pixels. */
export const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [12, 3], [2, 4]];

/** How an event is marked: a glyph, a word, and whether it is drawn into the charts. */
export const KINDS = {
  checkpoint: { glyph: "▼", word: "checkpoint" },
  knob: { glyph: "◆", word: "change" },
  sync: { glyph: "⇄", word: "sync" },
  pause: { glyph: "‖", word: "pause" },
  resume: { glyph: "▶", word: "resume" },
  warning: { glyph: "!", word: "warning" },
  error: { glyph: "✕", word: "error" },
  log: { glyph: "", word: "" },
  start: { glyph: "▶", word: "start" },
  end: { glyph: "■", word: "end" },
};

/** States in words, each with a glyph as a second cue. */
export const STATES = {
  running: { glyph: "●", text: "running", final: false },
  paused: { glyph: "‖", text: "paused", final: false },
  stopped: { glyph: "■", text: "stopped", final: true },
  finished: { glyph: "✓", text: "finished", final: true },
  failed: { glyph: "✕", text: "ended by an error", final: true },
  crashed: { glyph: "✕", text: "crashed: its process is gone", final: true },
};

/** @param {string} state */
export function stateOf(state) {
  return STATES[state] ?? { glyph: "?", text: state || "unknown", final: false };
}

/** @param {string} kind */
export function kindOf(kind) {
  return KINDS[kind] ?? { glyph: "•", word: kind };
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/**
 * A number in at most about seven characters.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e12 || size < 1e-3) {
    const [mantissa, power] = size.toExponential(1).split("e");
    const digits = [...String(Number(power))].map((c) => SUPERSCRIPTS[c] ?? c).join("");
    text = `${mantissa.replace(/\.0$/, "")}·10${digits}`;
  } else if (size >= 1e9) text = `${(size / 1e9).toPrecision(3)}G`;
  else if (size >= 1e6) text = `${(size / 1e6).toPrecision(3)}M`;
  else if (size >= 1e4) text = `${(size / 1e3).toPrecision(3)}k`;
  else if (size >= 100) text = size.toFixed(size % 1 === 0 ? 0 : 1);
  else if (size % 1 === 0) text = String(size);
  else text = size.toPrecision(3);
  return value < 0 ? `−${text}` : text;
}

/**
 * A number at an axis: no zeros that say nothing.
 * @param {number} value
 * @param {number} between  distance to the next tick; 0 = not known
 */
export function tick(value, between = 0) {
  // Where three digits do not tell neighbours apart, as many as their distance takes.
  if (between > 0 && Math.abs(value) / between > 900 && Math.abs(value) < 1e6) {
    return value.toFixed(Math.min(12, Math.max(0, Math.ceil(-Math.log10(between)))));
  }
  const text = number(Number(value.toPrecision(10)));
  return text.includes("·") ? text : text.replace(/(\.\d*?)0+(?=\D*$)/, "$1").replace(/\.(?=\D*$)/, "");
}

/**
 * Seconds in words: 48 s, 3 min 20 s, 2 h 05 min.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) {
    const whole = Math.round(seconds);
    return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/**
 * @typedef {{dark: boolean, lines: string[], text: string, strong: string, grid: string, accent: string, warn: string, bad: string, back: string, font: string}} Theme
 */

/**
 * The colours of the page that an element stands in; canvases cannot use CSS variables.
 * @param {Element} element
 * @returns {Theme}
 */
export function readTheme(element) {
  const style = getComputedStyle(element);
  const read = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
  const dark = isDark();
  // A canvas ignores what it cannot read, such as light-dark(…): the browser works such values out
  // for the colour of an element.
  const probe = document.createElement("span");
  element.append(probe);
  const colour = (name, fallback) => {
    probe.style.color = `var(${name}, ${fallback})`;
    const found = getComputedStyle(probe).color;
    return found.startsWith("rgb") || found.startsWith("color(") ? found : fallback;
  };
  const theme = {
    dark,
    lines: dark ? COLOURS_DARK : COLOURS,
    text: colour("--xl-muted", dark ? "#a8b0ba" : "#57606a"),
    strong: colour("--xl-text", dark ? "#e6e8eb" : "#1d2129"),
    grid: colour("--xl-grid", dark ? "rgba(255,255,255,.09)" : "rgba(0,0,0,.08)"),
    accent: colour("--xl-accent", "#1976d2"),
    warn: dark ? "#ffb454" : "#9a5b00",
    bad: dark ? "#ff7b72" : "#b3261e",
    back: colour("--xl-back", dark ? "#111" : "#fff"),
    font: `10px ${read("--xl-font", "system-ui, sans-serif")}`,
  };
  probe.remove();
  return theme;
}

/** True if the page is dark: JupyterLab and VS Code say so on the body, else the system does. */
export function isDark() {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight !== undefined) return jpThemeLight === "false";
  if (vscodeThemeKind !== undefined) return vscodeThemeKind !== "vscode-light";
  return globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
}

/**
 * Calls back whenever the theme of the page changes; returns what ends that.
 * @param {() => void} changed
 */
export function watchTheme(changed) {
  const observer = new MutationObserver(changed);
  observer.observe(document.body, {
    attributes: true,
    attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class"],
  });
  const media = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
  media?.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    media?.removeEventListener("change", changed);
  };
}

/**
 * A colour with some transparency.
 * @param {string} colour `#RRGGBB`
 * @param {number} share
 */
export function translucent(colour, share) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
}

const FOCUSABLE = new Set(["button", "input", "summary", "select", "textarea"]);

/**
 * An element with attributes and children; text is only ever set as text.  JupyterLab looks for its
 * shortcuts at the focused element before it looks at those around, so each that can have the focus
 * says that there are none.
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (FOCUSABLE.has(tag) || "tabindex" in attributes) element.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/**
 * A short piece of a line, for a legend.
 * @param {number} look
 * @param {"line" | "points" | "stack"} shape
 */
export function swatch(look, shape) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "xl-swatch");
  svg.setAttribute("viewBox", "0 0 18 8");
  svg.setAttribute("aria-hidden", "true");
  const colour = `var(--xl-c${look % COLOURS.length})`;
  if (shape === "points") {
    const dot = document.createElementNS(SVG, "circle");
    for (const [name, value] of [["cx", 9], ["cy", 4], ["r", 3]]) dot.setAttribute(name, String(value));
    dot.style.fill = colour;
    svg.append(dot);
    return svg;
  }
  const line = document.createElementNS(SVG, "line");
  for (const [name, value] of [["x1", 0], ["y1", 4], ["x2", 18], ["y2", 4]]) line.setAttribute(name, String(value));
  line.style.stroke = colour;
  line.setAttribute("stroke-width", shape === "stack" ? "6" : "2");
  if (shape === "line") line.setAttribute("stroke-dasharray", DASHES[look % DASHES.length].join(" "));
  svg.append(line);
  return svg;
}
