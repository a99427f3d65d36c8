// Marks the tokens in an answer that Markdown has turned into elements.

import { rejectedElement, textOf, tokenElement } from "./tokens.js";

// The maximum number of characters between a line and the last one that was found. Between them is
// markup that is not shown, such as the address of a link. A line further ahead is probably another
// one, and skipping to it would leave everything in between without marks.
const MAX_LINE_SKIP = 500;
// The same for a word of a line that Markdown has changed, such as one with `&amp;`.
const MAX_WORD_SKIP = 40;

/**
 * A part of the shown text that belongs to one token.
 *
 * @typedef {object} Segment
 * @property {string} text - empty for a rejected token
 * @property {number|null} index - the index of the token; null if the text has no mark
 */

/**
 * Mark each token below `root`.
 *
 * Each mark has the index of its token as `data-token`.
 *
 * @param {ParentNode} root - the answer's rendered Markdown
 * @param {string} text - the answer's Markdown
 * @param {import("./tokens.js").Token[]} tokens - those of the thought, if any, and of the answer
 */
export function markTokens(root, text, tokens) {
  const finder = new TokenFinder(tokens, text);
  let lastParent = root;
  for (const nodes of searchedTexts(root)) {
    lastParent = nodes.at(-1).parentNode;
    const shownText = nodes.map(({ data }) => data).join("");
    replace(nodes, finder.segmentsOf(shownText), tokens);
  }
  const rest = finder.rest();
  lastParent.append(...rest.flatMap((segment) => nodesOf(segment, tokens)));
}

// The text nodes that show a part of the answer. Highlighting splits a code block into many text
// nodes, which are searched as one text.
function searchedTexts(root) {
  const texts = [];
  let lastBlock = null;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const block = node.parentNode.closest?.("pre") ?? null;
    const isButton = node.parentNode.tagName === "BUTTON";
    if (block !== null && block === lastBlock) {
      texts.at(-1).push(node);
    } else if (block !== null || (node.data.trim() !== "" && !isButton)) {
      texts.push([node]);
    }
    lastBlock = block;
  }
  return texts;
}

// Replace text nodes by the segments of their joined text.
function replace(textNodes, segments, tokens) {
  const waiting = segments.toReversed();
  for (const node of textNodes) {
    const parts = takeText(waiting, node.data.length);
    node.replaceWith(...parts.flatMap((segment) => nodesOf(segment, tokens)));
  }
}

// Take the segments of the next `length` characters from the end of a list, and split the last one
// if it is longer.
function takeText(waiting, length) {
  const parts = [];
  let nLeft = length;
  while (waiting.length > 0 && (nLeft > 0 || waiting.at(-1).text === "")) {
    const segment = waiting.pop();
    const text = segment.text.slice(0, nLeft);
    parts.push({ ...segment, text });
    if (text.length < segment.text.length) {
      waiting.push({ ...segment, text: segment.text.slice(nLeft) });
    }
    nLeft -= text.length;
  }
  return parts;
}

// The nodes that show a segment.
function nodesOf({ text, index }, tokens) {
  if (index === null) {
    return [text];
  }
  const token = tokens[index];
  const nodes = token.kind === "rejected" ? [rejectedElement(token)] : tokenNodes(token, text);
  for (const node of nodes) {
    if (node instanceof Element) {
      node.dataset.token = index;
    }
  }
  return nodes;
}

// A part of a token. White space before it has no colour and no line below.
function tokenNodes(token, text) {
  const visible = text.trimStart();
  const space = text.slice(0, text.length - visible.length);
  const nodes = [];
  if (space !== "") {
    nodes.push(space);
  }
  if (visible !== "") {
    nodes.push(tokenElement(token, visible));
  }
  return nodes;
}

/**
 * Finds rendered text in the tokens' text, and goes through the tokens once.
 *
 * Markdown leaves out characters that are only markup, and changes some others. What it left out is
 * skipped; what it changed has no marks.
 */
class TokenFinder {
  #tokens;
  #tokenText;
  // The place in the tokens' text up to which the tokens are shown.
  #position;
  // The next token, and where its text starts in the tokens' text.
  #index = 0;
  #tokenStart = 0;

  constructor(tokens, text) {
    this.#tokens = tokens;
    this.#tokenText = textOf(tokens);
    this.#position = Math.max(0, this.#tokenText.lastIndexOf(text)); // the thought comes first
  }

  /**
   * Return the segments of a rendered text.
   *
   * @returns {Segment[]}
   */
  segmentsOf(text) {
    const lines = text.split(/(?<=\n)/);
    return lines.flatMap((line) => this.#lineSegments(line));
  }

  /** Return the segments after the last character, such as rejected tokens. */
  rest() {
    return this.#take(this.#tokenText.length, 0);
  }

  #lineSegments(line) {
    const start = this.#tokenText.indexOf(line, this.#position);
    if (start >= 0 && start < this.#position + MAX_LINE_SKIP) {
      return this.#take(start, line.length);
    }
    const words = line.split(/(?<=\s)|(?=\s)/);
    return words.flatMap((word) => this.#wordSegments(word));
  }

  #wordSegments(word) {
    const searchEnd = this.#position + MAX_WORD_SKIP + word.length;
    const offset = this.#tokenText.slice(this.#position, searchEnd).indexOf(word);
    if (offset < 0) {
      return [{ text: word, index: null }];
    }
    return this.#take(this.#position + offset, word.length);
  }

  // The segments of `length` characters of the tokens' text from `start` on, and of the rejected
  // tokens on the way there.
  #take(start, length) {
    const segments = [];
    const end = start + length;
    while (this.#index < this.#tokens.length) {
      const token = this.#tokens[this.#index];
      if (token.kind === "rejected") {
        const isInThought = this.#tokenStart < this.#position;
        if (!isInThought) {
          segments.push({ text: "", index: this.#index });
        }
      } else {
        segments.push({ text: this.#partOf(token, start, end), index: this.#index });
        const tokenEnd = this.#tokenStart + token.text.length;
        if (tokenEnd > end) {
          break; // the rest of this token is in the next text
        }
        this.#tokenStart = tokenEnd;
      }
      this.#index += 1;
    }
    this.#position = end;
    return segments;
  }

  // The part of the next token's text that is between two places in the tokens' text.
  #partOf(token, start, end) {
    const from = Math.max(0, start - this.#tokenStart);
    const to = Math.max(0, end - this.#tokenStart);
    return token.text.slice(from, to);
  }
}
