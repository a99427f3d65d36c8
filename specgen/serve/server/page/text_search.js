// Finds words in texts, and shows where they are.

// How many characters are shown at most before and after what was found.
const N_BEFORE = 24;
const N_AFTER = 90;
// The whole words at the end and at the beginning of a text.
const LAST_WORDS = new RegExp(`(?<!\\S).{0,${N_BEFORE}}$`, "u");
const FIRST_WORDS = new RegExp(`^.{0,${N_AFTER}}(?!\\S)`, "u");
// In their place, the end or the beginning of a word that is longer.
const LAST_CHARACTERS = new RegExp(`.{0,${N_BEFORE}}$`, "u");
const FIRST_CHARACTERS = new RegExp(`^.{0,${N_AFTER}}`, "u");

/** A search for words, in upper or lower case. They may be parts of longer words. */
export class TextSearch {
  // A pattern for each word, the longest first: it says most about what the user looks for.
  #patterns;
  // Finds all of the words.
  #anyWord;

  /** @param {string} query - what the user has typed */
  constructor(query) {
    const words = query.split(/\s+/).filter(Boolean);
    words.sort((a, b) => b.length - a.length);
    const sources = words.map(escapedForPattern);
    this.#patterns = sources.map((source) => new RegExp(source, "iu"));
    this.#anyWord = new RegExp(sources.join("|"), "giu");
  }

  /** Whether there is nothing to look for. */
  get isEmpty() {
    return this.#patterns.length === 0;
  }

  /** Whether a text has all of the words. */
  matches(text) {
    return this.#patterns.every((pattern) => pattern.test(text));
  }

  /**
   * Return the part of a text around the longest word that it has; empty if it has none.
   *
   * @param {string} text - with single spaces between its words
   */
  excerpt(text) {
    for (const pattern of this.#patterns) {
      const found = pattern.exec(text);
      if (found !== null) {
        return around(text, found.index, found.index + found[0].length);
      }
    }
    return "";
  }

  /** Return the nodes that show a text with the words marked. It is never parsed as HTML. */
  marked(text) {
    if (this.isEmpty) {
      return [text];
    }
    const nodes = [];
    let end = 0;
    for (const found of text.matchAll(this.#anyWord)) {
      const [word] = found;
      nodes.push(text.slice(end, found.index), markOf(word));
      end = found.index + word.length;
    }
    nodes.push(text.slice(end));
    return nodes;
  }
}

// A word as a regular expression that matches it.
function escapedForPattern(word) {
  return word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

// What is between two places of a text, with whole words before and after it.
function around(text, start, end) {
  // Not the whole text, because a pattern that ends with it is tried at each character.
  const textBefore = text.slice(Math.max(0, start - 3 * N_BEFORE), start);
  const textAfter = text.slice(end);
  const [before] = LAST_WORDS.exec(textBefore) ?? LAST_CHARACTERS.exec(textBefore);
  const [after] = FIRST_WORDS.exec(textAfter) ?? FIRST_CHARACTERS.exec(textAfter);
  const ellipsisBefore = before.length < start ? "… " : "";
  const ellipsisAfter = after.length < textAfter.length ? " …" : "";
  return ellipsisBefore + before + text.slice(start, end) + after.trimEnd() + ellipsisAfter;
}

function markOf(word) {
  const mark = document.createElement("mark");
  mark.textContent = word;
  return mark;
}
