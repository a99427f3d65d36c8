import { downloadJson, downloadMarkdown, importedConversation } from "./conversation_export.js";
import { closeList } from "./list_panel.js";
import { NOT_STORED, showNotice } from "./notice.js";
import { focusUndo, offerUndo } from "./undo_bar.js";

/** What can be done with a stored conversation. The address tells the page which one to show. */
export class ConversationActions {
  #store;
  #answerer;
  #list;

  /**
   * @param {import("./conversation_store.js").ConversationStore} store
   * @param {import("./answerer.js").Answerer} answerer
   * @param {import("./conversation_list.js").ConversationList} list
   */
  constructor(store, answerer, list) {
    this.#store = store;
    this.#answerer = answerer;
    this.#list = list;
  }

  async exportMarkdown(id) {
    downloadMarkdown(await this.#store.get(id));
  }

  async exportJson(id) {
    downloadJson(await this.#store.get(id));
  }

  /** Store the conversation in a file, and show it. */
  async importFile(file) {
    const conversation = importedConversation(await file.text());
    closeList();
    if (conversation === null) {
      showNotice(`${file.name} is not a conversation that was saved as JSON.`);
      return;
    }
    try {
      const { id } = await this.#store.save(conversation);
      location.hash = id;
    } catch (error) {
      console.warn(error); // the storage is full or blocked
      showNotice(NOT_STORED);
    }
  }

  async delete(id) {
    const title = this.#list.titleOf(id);
    await this.#answerer.stop(this.#answerer.conversationWith(id));
    const backup = await this.#store.backup(id);
    await this.#store.delete(id);
    this.offerToRestore(`“${title}” was deleted.`, backup);
    focusUndo();
  }

  /**
   * Offer to bring a conversation back as it was.
   *
   * @param {string} text - tells what was changed
   * @param {import("./conversation_store.js").Backup} backup
   */
  offerToRestore(text, backup) {
    const { id } = backup.conversation;
    offerUndo(text, id, async () => {
      await this.#answerer.stop(this.#answerer.conversationWith(id));
      await this.#store.restore(backup);
      closeList();
      location.hash = id;
    });
  }
}
