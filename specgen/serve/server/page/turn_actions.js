import { copyFor } from "./copy_button.js";
import { messageOf, showNotice } from "./notice.js";
import { editedQuestion } from "./question_editor.js";
import { downloadReplay } from "./replay_download.js";

const SAME_ANSWER =
  "The answer is the same again. In the settings, a higher temperature allows other answers.";

/** What the buttons of a turn do. */
export class TurnActions {
  #client;
  #store;
  #answerer;
  #offerToRestore;
  #ask;

  /**
   * @param {import("./api_client.js").ApiClient} client
   * @param {import("./conversation_store.js").ConversationStore} store
   * @param {import("./answerer.js").Answerer} answerer
   * @param {function(string, object): void} offerToRestore - as in ConversationActions
   * @param {function(Conversation, string, object[]): Promise<Turn>} ask - asks a question at the
   *   end of a conversation, and resolves to its turn when the answer has ended
   */
  constructor(client, store, answerer, offerToRestore, ask) {
    this.#client = client;
    this.#store = store;
    this.#answerer = answerer;
    this.#offerToRestore = offerToRestore;
    this.#ask = ask;
  }

  /** Copy the block of code that the button belongs to, or the whole answer. */
  copy(turn, button) {
    const code = button.parentElement.querySelector("pre");
    return copyFor(button, code === null ? turn.text : code.textContent);
  }

  /** Let a question be answered again. */
  async retry(turn, conversation) {
    const newTurn = await this.#askAnew(turn, turn.question, conversation);
    if (newTurn?.text === turn.text && turn.text !== "") {
      showNotice(SAME_ANSWER);
    }
  }

  /** Let the user change a question, and ask it anew. */
  async edit(turn, conversation, button) {
    const text = await editedQuestion(turn.questionElement, turn.question);
    if (text === null || text === "") {
      button.focus();
      return;
    }
    document.getElementById("question").focus();
    await this.#askAnew(turn, text, conversation);
  }

  async saveReplay(turn) {
    try {
      const response = await this.#client.request("page/replay.html");
      downloadReplay(await response.text(), await turn.events());
    } catch (error) {
      showNotice(messageOf(error));
    }
  }

  // Ask a question in place of a turn and all later ones, and return the new turn; null if the turn
  // was replaced already, by the first of two quick clicks.
  async #askAnew(turn, text, conversation) {
    await this.#answerer.stop(conversation);
    const backup = await this.#backup(conversation);
    const nRemoved = conversation.removeFrom(turn);
    if (nRemoved === 0) {
      return null;
    }
    const nLater = nRemoved - 1;
    const answered = this.#ask(conversation, text, turn.attachments);
    if (document.activeElement === document.body) { // the focus was on a button of the old turn
      document.getElementById("stop").focus();
    }
    if (backup !== null && (turn.text !== "" || nLater > 0)) {
      this.#offerToRestore(replacedText(conversation.shownTitle, nLater), backup);
    }
    return answered;
  }

  // The conversation as it is stored; null if it is not.
  async #backup(conversation) {
    try {
      return await this.#store.backup(conversation.id);
    } catch {
      return null; // the storage is blocked
    }
  }
}

function replacedText(title, nLaterTurns) {
  const replaced = `The answer in “${title}” was replaced`;
  if (nLaterTurns === 0) {
    return `${replaced}.`;
  }
  return nLaterTurns === 1
    ? `${replaced}, and the turn after it removed.`
    : `${replaced}, and the ${nLaterTurns} turns after it removed.`;
}
