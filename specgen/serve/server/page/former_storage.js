import { newId } from "./identifiers.js";
import { loadItem, removeItem, saveItem } from "./storage.js";

/**
 * Take over the conversation that older versions of the page kept in the local storage.
 *
 * @param {import("./conversation_store.js").ConversationStore} store
 * @returns {Promise<string|null>} the id of the conversation; null if there was none
 */
export async function takeOverFormerConversation(store) {
  const formerTurns = loadItem("turns") ?? [];
  removeItem("turns"); // before anything is awaited, so that another tab does not take it over too
  if (formerTurns.length === 0) {
    return null;
  }
  const now = Date.now();
  const conversation = {
    id: newId(),
    title: null,
    createdMs: now,
    changedMs: now,
    revision: 0,
    leftOut: null,
    turns: formerTurns.map((turn) => ({
      id: newId(),
      attachments: [],
      passes: [],
      hasEvents: false,
      ...turn,
    })),
  };
  try {
    await store.save(conversation);
  } catch (error) {
    saveItem("turns", formerTurns);
    throw error;
  }
  return conversation.id;
}
