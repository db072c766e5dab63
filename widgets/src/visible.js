// Text in which nothing acts: what would change the layout, or cannot be seen, is written out.

const NAMES = new Map([[0x7f, "␡"]]);
for (let code = 0; code < 0x20; code += 1) NAMES.set(code, String.fromCodePoint(0x2400 + code));
const PLAIN = /^[\x20-\x7e]*$/;
const SPLIT = /\r\n|[\s\S]/gu;
const HIDDEN = /^[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Default_Ignorable_Code_Point}]$/u;
const SPACE = /^\p{Zs}$/u;
const MARK = /^\p{M}$/u;
const JOINER = /^[\u200c\u200d\ufe0e\ufe0f]$/u;
// Flags of Wales and others are spelled in them; elsewhere they smuggle text past the eye.
const TAG = /^[\u{e0020}-\u{e007f}]$/u;
/** Marks on one letter; more of them would be drawn over the lines around. */
const MOST_MARKS = 4;
/** Characters of one token that are shown. */
export const MOST_CHARS = 2000;

/**
 * @typedef {{text: string, mark?: boolean, title?: string}} Part
 */

/** @param {string} char */
function codeOf(char) {
  return `U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/**
 * A text in parts, those that stand for something else marked.
 * @param {string} text
 * @param {boolean} raw  every blank and every invisible sign by name
 * @returns {Part[]}
 */
export function visible(text, raw) {
  if (!raw && text.length <= MOST_CHARS && PLAIN.test(text)) return text ? [{ text }] : [{ text: "∅", mark: true, title: "no text" }];
  if (!text) return [{ text: "∅", mark: true, title: "no text" }];
  /** @type {Part[]} */
  const parts = [];
  const put = (piece, title) => {
    const last = parts[parts.length - 1];
    if (title === undefined && last && !last.mark) last.text += piece;
    else parts.push(title === undefined ? { text: piece } : { text: piece, mark: true, title });
  };
  let marks = 0;
  let before = "";
  let flag = false;
  const cut = text.length > MOST_CHARS ? text.slice(0, MOST_CHARS) : text;
  for (const char of cut.match(SPLIT) ?? []) {
    flag = char === "\u{1f3f4}" || (flag && TAG.test(char));
    marks = MARK.test(char) ? marks + 1 : JOINER.test(char) ? marks : 0;
    if (char === "\r\n") put(raw ? "␍⏎\n" : "↵\n", "U+000D U+000A");
    else if (char === "\n") put(raw ? "⏎\n" : "↵\n", "U+000A");
    else if (char === "\t") raw ? put("⇥\t", "U+0009") : put(char);
    else if (char === " ") raw ? put("␣", "U+0020") : put(char);
    else if (NAMES.has(char.codePointAt(0))) put(NAMES.get(char.codePointAt(0)), codeOf(char));
    else if (!raw && ((JOINER.test(char) && before) || (flag && TAG.test(char)))) put(char);
    else if (HIDDEN.test(char)) raw ? put(`⟨${codeOf(char)}⟩`, codeOf(char)) : put("▯", codeOf(char));
    else if (SPACE.test(char) && raw) put(`⟨${codeOf(char)}⟩`, codeOf(char));
    else if (marks > MOST_MARKS) put(raw ? `⟨${codeOf(char)}⟩` : "▯", codeOf(char));
    else put(marks && !before ? `◌${char}` : char);
    before = HIDDEN.test(char) && !JOINER.test(char) ? "" : char;
  }
  if (cut.length < text.length) put(`⟨${(text.length - cut.length).toLocaleString("en")} more characters⟩`, "cut off here; the whole text can be copied");
  return parts;
}

/**
 * Bytes as one would write them in Python: text in quotes, else a bytes literal.
 * @param {Uint8Array | null} bytes
 */
export function literal(bytes) {
  if (!bytes) return "";
  const some = bytes.length > MOST_CHARS ? bytes.subarray(0, MOST_CHARS) : bytes;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.length > MOST_CHARS ? bytes : some);
  } catch {
    return `b'${[...some].map((b) => (b >= 0x20 && b < 0x7f && b !== 0x27 && b !== 0x5c ? String.fromCharCode(b) : `\\x${b.toString(16).padStart(2, "0")}`)).join("")}'${some.length < bytes.length ? " …" : ""}`;
  }
  return `'${escaped(text.slice(0, MOST_CHARS))}'${text.length > MOST_CHARS ? " …" : ""}`;
}

const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", "'": "\\'" };

/** @param {string} text */
export function escaped(text) {
  let found = "";
  for (const char of text) {
    const code = char.codePointAt(0);
    if (SHORT[char]) found += SHORT[char];
    else if (code < 0x20 || (code >= 0x7f && code < 0xa0)) found += `\\x${code.toString(16).padStart(2, "0")}`;
    else if (HIDDEN.test(char) || MARK.test(char) || (SPACE.test(char) && code !== 0x20)) found += code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
    else found += char;
  }
  return found;
}

/**
 * One line of a text for a table: blanks of all kinds as one, nothing that acts.
 * @param {string | null | undefined} text
 */
export function oneLine(text) {
  return visible((text ?? "").slice(0, 300).replace(/[ \t\r\n]+/g, " "), false).map((part) => part.text).join("");
}
