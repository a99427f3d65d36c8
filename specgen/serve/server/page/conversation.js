import { titleOf } from "./conversation_title.js";
import { counted } from "./format.js";
import { newId } from "./identifiers.js";
import { NOT_STORED, showNotice } from "./notice.js";
import { Turn } from "./turn.js";

const COPIED =
  "Another tab has changed this conversation in the meantime. What you see here is stored as a copy.";

/**
 * The oldest turns, which the model no longer sees, because the context is full.
 *
 * @typedef {object} LeftOut
 * @property {number} nTurns
 * @property {number} nContext - the size of the context in tokens
 */

/** The turns of a conversation, and the element that shows them. */
export class Conversation {
  #store;
  #keepEndInView;
  #createdMs = Date.now();
  #changedMs = Date.now();
  #revision = 0;
  // Whether the page is being closed, and has left the conversation for other pages to store.
  #isLeft = false;
  #turns = [];
  /** @type {LeftOut|null} */
  #leftOut = null;
  // The line below the turns that are left out.
  #mark = document.createElement("p");
  // Resolves when everything so far is stored.
  #saving = Promise.resolve();

  /**
   * Begin a conversation.
   *
   * @param {import("./conversation_store.js").ConversationStore} store - where `save` puts it
   * @param {function(function(): void): void} keepEndInView - makes a change to a turn, and keeps
   *   the end of the conversation in view
   */
  constructor(store, keepEndInView) {
    this.#store = store;
    this.#keepEndInView = keepEndInView;
    this.id = newId();
    /** The title that the user gave it; null if it has that of its first question. */
    this.title = null;
    this.element = document.getElementById("turns").content.firstElementChild.cloneNode(true);
    this.#mark.className = "mark";
  }

  /**
   * Return a stored conversation.
   *
   * @param {import("./conversation_store.js").SavedConversation} saved
   */
  static restored(saved, store, keepEndInView) {
    const conversation = new Conversation(store, keepEndInView);
    conversation.update(saved);
    return conversation;
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  /** The title that the user gave it, or the beginning of its first question. */
  get shownTitle() {
    return titleOf({ title: this.title, turns: this.#turns });
  }

  /** Let screen readers wait until the answer is complete. */
  setBusy(isBusy) {
    this.element.ariaBusy = String(isBusy);
  }

  /** Whether the browser has stored it, as far as this page knows. */
  get isStored() {
    return this.#revision > 0;
  }

  get nTurns() {
    return this.#turns.length;
  }

  // --- turns

  /** Add a turn at the end, and return it. */
  ask(question, attachments = []) {
    const turn = new Turn({ id: newId(), question, attachments }, this.#keepEndInView);
    this.#changedMs = Date.now();
    this.#add(turn);
    return turn;
  }

  /** Return the turn that contains an element. */
  turnWith(element) {
    return this.#turns.find((turn) => turn.element.contains(element));
  }

  /** Remove a turn and all later ones, and return how many these are; 0 if it is not there. */
  removeFrom(turn) {
    const nBefore = this.#turns.indexOf(turn);
    return nBefore < 0 ? 0 : this.#cut(nBefore);
  }

  /** Return the messages of all turns for a request, without the first `nLeftOut` turns. */
  messages(nLeftOut) {
    return this.#turns.slice(nLeftOut).flatMap((turn) => turn.messages());
  }

  /** @returns {LeftOut|null} what the model no longer sees */
  get leftOut() {
    return this.#leftOut;
  }

  /** Leave out the oldest turns from now on, and show a mark below them. */
  leaveOut(leftOut) {
    this.#leftOut = leftOut;
    this.#showMark();
  }

  // --- storing

  /** @returns {import("./conversation_store.js").SavedConversation} */
  saved() {
    return {
      id: this.id,
      title: this.title,
      createdMs: this.#createdMs,
      changedMs: this.#changedMs,
      revision: this.#revision,
      leftOut: this.#leftOut,
      turns: this.#turns.map((turn) => turn.saved()),
    };
  }

  /**
   * Store the conversation. If that fails, the user is told.
   *
   * @param {Turn|null} [answeredTurn] - the turn whose answer has ended; its events are stored as
   *   well
   */
  save(answeredTurn = null) {
    // One after the other, since each raises the revision that the next one starts from.
    this.#saving = this.#saving.then(() => this.#saveNow(answeredTurn));
    return this.#saving;
  }

  /** Let other pages store the conversation, since this one is being closed. */
  leave() {
    if (!this.#isLeft) {
      this.#store.leave(this.saved());
      this.#isLeft = true;
    }
  }

  /** Show what is stored, such as what another tab has; turns that are the same stay. */
  update(saved) {
    this.#isLeft = false;
    this.#adopt(saved);
    this.#createdMs = saved.createdMs;
    this.#changedMs = saved.changedMs;
    this.#cut(this.#nSame(saved.turns));
    saved.turns.slice(this.#turns.length).forEach((turn) => this.#restoreTurn(turn));
    this.leaveOut(saved.leftOut);
  }

  async #saveNow(answeredTurn) {
    if (this.#isLeft) {
      return;
    }
    const current = this.saved();
    try {
      const saved = await this.#store.save(current, await replayOf(answeredTurn));
      this.#adopt(saved);
      if (saved.id !== current.id) {
        showNotice(COPIED);
      }
    } catch (error) {
      console.warn(error); // the storage is full or blocked
      showNotice(NOT_STORED);
    }
  }

  #adopt({ id, title, revision }) {
    this.id = id;
    this.title = title;
    this.#revision = revision;
  }

  // The number of turns at the beginning that are the same as stored ones.
  #nSame(savedTurns) {
    const firstOther = this.#turns.findIndex(
      (turn, index) => JSON.stringify(turn.saved()) !== JSON.stringify(savedTurns[index]),
    );
    return firstOther < 0 ? this.#turns.length : firstOther;
  }

  #restoreTurn(saved) {
    const loadEvents = () => this.#store.events(this.id, saved.id);
    this.#add(Turn.restored(saved, this.#keepEndInView, loadEvents));
  }

  #add(turn) {
    this.#turns.push(turn);
    this.element.append(turn.element);
  }

  // Remove the turns after the first `nKept`, and return how many these are.
  #cut(nKept) {
    const removed = this.#turns.splice(nKept);
    removed.forEach((turn) => turn.element.remove());
    if (this.#leftOut !== null && this.#leftOut.nTurns > nKept) {
      this.leaveOut(null);
    }
    return removed.length;
  }

  #showMark() {
    this.#mark.remove();
    if (this.#leftOut === null) {
      return;
    }
    const { nTurns, nContext } = this.#leftOut;
    const turns = nTurns === 1 ? "the turn above" : `the ${counted(nTurns, "turn")} above`;
    this.#mark.textContent =
      `The context of ${nContext} tokens is full: the model no longer sees ${turns}.`;
    this.#turns[nTurns - 1]?.element.after(this.#mark);
  }
}

// The events of a turn in the form in which the store takes them; null if there are none.
async function replayOf(turn) {
  return turn?.hasEvents ? [turn.id, await turn.events()] : null;
}
