import { saveItem } from "./storage.js";

// The end counts as visible if no more than this is hidden below.
const NEAR_END_PX = 40;

/** The turns of the conversation, and the part of the page that shows them. */
export class Conversation {
  #element;
  #turns = [];

  /** @param {HTMLElement} element - the part of the page that scrolls */
  constructor(element) {
    this.#element = element;
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  add(turn) {
    this.#turns.push(turn);
    this.#element.append(turn.element);
  }

  removeLast() {
    this.#turns.pop().element.remove();
  }

  clear() {
    this.#turns.forEach((turn) => turn.element.remove());
    this.#turns = [];
  }

  /** Return the messages of all turns for a request. */
  messages() {
    return this.#turns.flatMap((turn) => turn.messages());
  }

  /** Return the turn that contains an element. */
  turnWith(element) {
    return this.#turns.find((turn) => turn.element.contains(element));
  }

  /** Store all turns in the browser. */
  save() {
    const savedTurns = this.#turns.map((turn) => turn.saved());
    saveItem("turns", savedTurns);
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

  /** Let screen readers wait until the answer is complete. */
  setBusy(isBusy) {
    this.#element.ariaBusy = String(isBusy);
  }
}
