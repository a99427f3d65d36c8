// Marks the tokens in an answer that Markdown has turned into elements.

import { rejectedElement, textOf, tokenElement } from "./tokens.js";

// The maximum number of characters between a line and the last one that was found. Between them is
// markup that is not shown, such as the address of a link. A line further ahead is probably another
// one, and skipping to it would leave everything in between without marks.
const MAX_LINE_SKIP = 500;
// The same for a word of a line that Markdown has changed, such as one with `&amp;`.
const MAX_WORD_SKIP = 40;

/**
 * Mark each token below `root`.
 *
 * @param {ParentNode} root - the answer's rendered Markdown
 * @param {string} text - the answer's Markdown
 * @param {import("./tokens.js").Token[]} tokens - those of the thought, if any, and of the answer
 */
export function highlightTokens(root, text, tokens) {
  const highlighter = new Highlighter(tokens, text);
  let lastParent = root;
  for (const node of textNodesOf(root)) {
    lastParent = node.parentNode;
    node.replaceWith(...highlighter.nodesOf(node.data));
  }
  lastParent.append(...highlighter.rest());
}

// The text nodes that show a part of the answer.
function textNodesOf(root) {
  const nodes = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const isButton = node.parentNode.tagName === "BUTTON";
    if (node.data.trim() !== "" && !isButton) {
      nodes.push(node);
    }
  }
  return nodes;
}

/**
 * Finds rendered text in the tokens' text, and goes through the tokens once.
 *
 * Markdown leaves out characters that are only markup, and changes some others. What it left out is
 * skipped; what it changed has no marks.
 */
class Highlighter {
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

  // The nodes of a rendered text.
  nodesOf(text) {
    const lines = text.split(/(?<=\n)/);
    return lines.flatMap((line) => this.#lineNodes(line));
  }

  // The nodes after the last character, such as rejected tokens.
  rest() {
    return this.#take(this.#tokenText.length, 0);
  }

  #lineNodes(line) {
    const start = this.#tokenText.indexOf(line, this.#position);
    if (start >= 0 && start < this.#position + MAX_LINE_SKIP) {
      return this.#take(start, line.length);
    }
    const words = line.split(/(?<=\s)|(?=\s)/);
    return words.flatMap((word) => this.#wordNodes(word));
  }

  #wordNodes(word) {
    const searchEnd = this.#position + MAX_WORD_SKIP + word.length;
    const offset = this.#tokenText.slice(this.#position, searchEnd).indexOf(word);
    if (offset < 0) {
      return [word];
    }
    return this.#take(this.#position + offset, word.length);
  }

  // The nodes of `length` characters of the tokens' text from `start` on, and of the rejected
  // tokens on the way there.
  #take(start, length) {
    const nodes = [];
    const end = start + length;
    while (this.#index < this.#tokens.length) {
      const token = this.#tokens[this.#index];
      if (token.kind === "rejected") {
        nodes.push(...this.#rejectedNodes(token));
      } else {
        nodes.push(...tokenNodes(token, this.#partOf(token, start, end)));
        const tokenEnd = this.#tokenStart + token.text.length;
        if (tokenEnd > end) {
          break; // the rest of this token is in the next text
        }
        this.#tokenStart = tokenEnd;
      }
      this.#index += 1;
    }
    this.#position = end;
    return nodes;
  }

  #rejectedNodes(token) {
    const isInThought = this.#tokenStart < this.#position;
    return isInThought ? [] : [rejectedElement(token)];
  }

  // The part of the next token's text that is between two places in the tokens' text.
  #partOf(token, start, end) {
    const from = Math.max(0, start - this.#tokenStart);
    const to = Math.max(0, end - this.#tokenStart);
    return token.text.slice(from, to);
  }
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
