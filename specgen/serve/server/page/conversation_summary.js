import { titleOf } from "./conversation_title.js";

// How many characters are shown before and after the beginning of what was found.
const N_BEFORE = 24;
const N_AFTER = 90;

/** What the list of conversations shows, and searches. */
export class ConversationSummary {
  #text;
  #searched;

  /** @param {import("./conversation_store.js").SavedConversation} saved */
  constructor(saved) {
    this.id = saved.id;
    this.title = titleOf(saved);
    this.changedMs = saved.changedMs;
    this.#text = saved.turns.flatMap(textsOf).join(" ").replace(/\s+/g, " ");
    this.#searched = `${this.title} ${this.#text}`.toLowerCase();
  }

  /** Whether the conversation has all of these words, which are in lower case. */
  matches(words) {
    return words.every((word) => this.#searched.includes(word));
  }

  /** Return the text around the first of these words that is in a turn; empty if none is. */
  excerpt(words) {
    const text = this.#text.toLowerCase();
    const word = words.find((candidate) => text.includes(candidate));
    if (word === undefined) {
      return "";
    }
    const found = text.indexOf(word);
    const start = Math.max(0, found - N_BEFORE);
    const end = found + N_AFTER;
    const before = start > 0 ? "… " : "";
    const after = end < text.length ? " …" : "";
    return before + this.#text.slice(start, end).trim() + after;
  }
}

function textsOf({ question, attachments, text }) {
  return [question, ...attachments.flatMap((file) => [file.name, file.text]), text];
}
