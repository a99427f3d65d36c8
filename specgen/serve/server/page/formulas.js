// Formulas of an answer: $...$, $$...$$, \(...\) and \[...\].
//
// Markdown leaves their source in a <var> element, in which the tokens are marked. KaTeX then
// replaces it by MathML, which browsers draw without fonts and style sheets of its own. It is
// loaded with the first formula.

import { escaped } from "./html_escape.js";
import DOMPurify from "./vendor/purify.es.mjs";

// Anything but an empty line.
const BODY = String.raw`(?:[^\n]|\n(?![ \t]*\n))`;
const DOLLARS = String.raw`\$\$(?:(?!\$\$)${BODY})+`;
const BRACKET = String.raw`\\\[(?:(?!\\\])${BODY})+`;
const DISPLAYED = String.raw`(?:${DOLLARS}\$\$|${BRACKET}\\\])`;
// A displayed formula on lines of its own, or the beginning of one at the end of the text.
const BLOCK = new RegExp(
  String.raw`^ {0,3}(?:${DISPLAYED}[ \t]*(?=\n|$)|(?:${DOLLARS}|${BRACKET})$)`,
);
const BLOCK_START = /\n {0,3}(?:\$\$|\\\[)/;
// A displayed formula within a line.
const DISPLAYED_IN_LINE = new RegExp(`^${DISPLAYED}`);
const PARENTHESIZED = new RegExp(String.raw`^\\\((?:(?!\\\))${BODY})+\\\)`);
// A single dollar is next to its formula, and no word follows or precedes: "$HOME/$USER".
const IN_DOLLARS = /^\$(?![\s$])(?:\\.|[^$\\\n`])+(?<!\s)\$(?![\p{L}\d$])/u;
const WORD_BEFORE = /[\p{L}\d]$/u;
// A number and words: "$5, or 6$".
const PRICE = /^\$\d[^\\^_={}<>+]*\s[^\\^_={}<>+]*\$$/;
const INLINE_START = /\$|\\[([]/;
// The delimiters of a complete formula.
const DELIMITERS = [
  { start: "$$", end: "$$", isDisplayed: true },
  { start: "\\[", end: "\\]", isDisplayed: true },
  { start: "\\(", end: "\\)", isDisplayed: false },
  { start: "$", end: "$", isDisplayed: false },
];

const KATEX_OPTIONS = {
  output: "mathml",
  strict: "ignore",
  trust: false,
  maxExpand: 200,
  maxSize: 20,
};
const SANITIZER_OPTIONS = {
  USE_PROFILES: { mathMl: true },
  ADD_TAGS: ["semantics", "annotation"],
  ADD_ATTR: ["columnalign", "columnspacing"],
  FORBID_ATTR: ["style"],
  RETURN_DOM_FRAGMENT: true,
};
// The maximum number of formulas whose MathML is remembered.
const MAX_REMEMBERED = 500;

// KaTeX; null until it is loaded.
let katex = null;
let isLoading = false;
// The MathML of formulas, by their source; null for one that KaTeX does not understand.
const mathBySource = new Map();

/** Extensions of marked that find formulas. */
export const formulaExtensions = [
  {
    name: "formulaBlock",
    level: "block",
    start(text) {
      const index = text.search(BLOCK_START);
      return index < 0 ? undefined : index + 1;
    },
    tokenizer: (text) => formulaToken("formulaBlock", text.match(BLOCK)?.[0]),
    renderer: formulaHtml,
  },
  {
    name: "formula",
    level: "inline",
    start(text) {
      const index = text.search(INLINE_START);
      return index < 0 ? undefined : index;
    },
    tokenizer: (text, tokens) => formulaToken("formula", inlineSource(text, tokens.at(-1)?.raw)),
    renderer: formulaHtml,
  },
];

function formulaToken(type, source) {
  return source === undefined ? undefined : { type, raw: source };
}

function formulaHtml({ raw }) {
  return `<var>${escaped(raw.trim())}</var>`;
}

// The formula at the beginning of a text; undefined if there is none.
function inlineSource(text, before = "") {
  const source = (text.match(PARENTHESIZED) ?? text.match(IN_DOLLARS))?.[0];
  if (source !== undefined) {
    const isDollar = source.startsWith("$");
    const isPrice = isDollar && (PRICE.test(source) || WORD_BEFORE.test(before));
    return isPrice ? undefined : source;
  }
  const displayed = text.match(DISPLAYED_IN_LINE)?.[0];
  if (displayed === undefined) {
    return undefined;
  }
  // An escaped bracket is not a formula: "\[sic\]".
  const isFormula = displayed.startsWith("$") || /[\\^_=]/.test(displayed.slice(2, -2));
  return isFormula ? displayed : undefined;
}

/**
 * Show all formulas below `root` as such.
 *
 * Until KaTeX is loaded, and where it understands nothing, the source is shown.
 *
 * @param {ParentNode} root - rendered Markdown, with marked tokens
 */
export function showFormulas(root) {
  for (const element of root.querySelectorAll("var")) {
    showFormula(element);
  }
}

function showFormula(element) {
  const source = element.textContent;
  const { isDisplayed } = DELIMITERS.find(({ start }) => source.startsWith(start));
  element.className = isDisplayed ? "formula displayed" : "formula";
  const tex = texOf(source);
  if (tex === null) {
    return; // the end is still to come
  }
  if (katex === null) {
    element.classList.add("waiting");
    loadKatex();
    return;
  }
  const math = mathOf(tex, isDisplayed);
  if (math !== null) {
    const firstMark = element.querySelector("[data-token]");
    if (firstMark !== null) {
      element.dataset.token = firstMark.dataset.token;
    }
    element.replaceChildren(math.cloneNode(true));
  }
}

// What is between the delimiters; null if the formula is not complete.
function texOf(source) {
  const { start, end } = DELIMITERS.find((delimiters) => source.startsWith(delimiters.start));
  const isComplete = source.length > start.length + end.length && source.endsWith(end);
  return isComplete ? source.slice(start.length, -end.length) : null;
}

// The MathML of a formula; null if KaTeX does not understand it.
function mathOf(tex, isDisplayed) {
  const key = `${isDisplayed} ${tex}`;
  if (!mathBySource.has(key)) {
    if (mathBySource.size >= MAX_REMEMBERED) {
      mathBySource.clear();
    }
    mathBySource.set(key, typeset(tex, isDisplayed));
  }
  return mathBySource.get(key);
}

function typeset(tex, isDisplayed) {
  let html;
  try {
    html = katex.renderToString(tex, { ...KATEX_OPTIONS, displayMode: isDisplayed });
  } catch {
    return null;
  }
  // Inline styles, which the content policy forbids, are not even parsed.
  const withoutStyles = html.replace(/ style="[^"]*"/g, "");
  const math = DOMPurify.sanitize(withoutStyles, SANITIZER_OPTIONS).querySelector("math");
  math?.querySelector("annotation")?.remove();
  math?.querySelectorAll('menclose[notation="box"]').forEach(leaveBoxToStyleSheet);
  return math;
}

// Firefox and Safari draw a box by themselves, and Chromium does not: the style sheet does for all.
function leaveBoxToStyleSheet(element) {
  element.setAttribute("notation", "");
  element.classList.add("boxed");
}

async function loadKatex() {
  if (isLoading) {
    return;
  }
  isLoading = true;
  try {
    await import("./vendor/katex.min.js");
    katex = globalThis.katex;
    document.querySelectorAll("var.waiting").forEach(showFormula);
  } catch {
    isLoading = false; // the server cannot be reached: the source stays until the next drawing
  }
}
