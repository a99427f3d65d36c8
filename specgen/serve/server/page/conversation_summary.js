import { titleOf } from "./conversation_title.js";

/** What the list of conversations shows, and searches. */
export class ConversationSummary {
  #text;

  /** @param {import("./conversation_store.js").SavedConversation} saved */
  constructor(saved) {
    this.id = saved.id;
    this.title = titleOf(saved);
    this.changedMs = saved.changedMs;
    this.#text = saved.turns.flatMap(textsOf).join(" ").replace(/\s+/g, " ");
  }

  /**
   * Whether the conversation has all the words of a search.
   *
   * @param {import("./text_search.js").TextSearch} search
   */
  matches(search) {
    return search.matches(`${this.title} ${this.#text}`);
  }

  /** Return the text around what was found in a turn; empty if nothing was. */
  excerpt(search) {
    return search.excerpt(this.#text);
  }
}

function textsOf({ question, attachments, text }) {
  return [question, ...attachments.flatMap((file) => [file.name, file.text]), text];
}
