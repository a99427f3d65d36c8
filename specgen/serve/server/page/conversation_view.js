// The end counts as visible if no more than this is hidden below.
const NEAR_END_PX = 40;

/** The part of the page that shows a conversation and scrolls. */
export class ConversationView {
  #element;
  #shown = null;

  /** @param {HTMLElement} element */
  constructor(element) {
    this.#element = element;
  }

  /** Show a conversation in place of the last one. */
  show(conversation) {
    this.#shown?.element.remove();
    this.#shown = conversation;
    this.#element.append(conversation.element);
    // The introduction, which only an empty conversation shows, is read from its beginning.
    this.#element.scrollTop = conversation.isEmpty ? 0 : this.#element.scrollHeight;
  }

  scrollToEnd() {
    this.#element.scrollTop = this.#element.scrollHeight;
  }

  /** Make a change that may make a turn longer, and keep the end in view if it was. */
  keepEndInView(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    change();
    if (isAtEnd) {
      this.scrollToEnd();
    }
  }
}
