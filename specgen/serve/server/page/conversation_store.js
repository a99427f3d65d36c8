// The conversations that this browser stores for this server, in IndexedDB.
//
// Several tabs may show the same conversation. Whoever saves its turns raises its revision. A tab
// that saves turns on top of an older revision does not replace those of the other tab: its own
// are stored as a copy of the conversation. A page that is being closed cannot look at what is
// stored, so it leaves its turns next to it; a page that is open, or the next one, compares them.

import { newId } from "./identifiers.js";
import { STORAGE_NAME } from "./storage.js";
import { openDB } from "./vendor/idb.js";

/**
 * A conversation as the browser stores it.
 *
 * @typedef {object} SavedConversation
 * @property {string} id
 * @property {string|null} title - given by the user; null for the beginning of the first question
 * @property {number} createdMs
 * @property {number} changedMs - when a turn was last added or changed
 * @property {number} revision - how often the turns were saved; 0 if they never were
 * @property {import("./conversation.js").LeftOut|null} leftOut
 * @property {import("./turn.js").SavedTurn[]} turns
 */

/**
 * A conversation with the events of its answers, by which it can be brought back.
 *
 * @typedef {object} Backup
 * @property {SavedConversation} conversation
 * @property {[string, object[]][]} replays - the id of each turn that has events, and the events
 */

const VERSION = 1;
const CONVERSATIONS = "conversations";
// The events of answers, which are large and seldom needed. The key is the id of the conversation
// and that of the turn.
const REPLAYS = "replays";
// What a page left when it was closed is stored among the conversations, with an id that begins so.
const LEFT = "left ";
// The other ids are hexadecimal numbers, which are lower.
const LEFT_IDS = IDBKeyRange.lowerBound(LEFT);
const CONVERSATION_IDS = IDBKeyRange.upperBound(LEFT);

export class ConversationStore {
  // Resolves to the database.
  #opening;
  // The database; null until it is open.
  #database = null;
  // Tells other tabs what has changed; null if the browser blocks it.
  #channel = openChannel();
  #listeners = [];

  constructor() {
    this.#opening = this.#open();
    this.#opening.catch(() => {}); // whoever uses the store gets the error
    if (this.#channel !== null) {
      this.#channel.onmessage = ({ data: id }) => this.#hear(id);
    }
  }

  /**
   * Call `listener` after each change of a conversation.
   *
   * @param {function(string, boolean): void} listener - gets the id of the conversation, and
   *   whether another tab has changed it
   */
  onChange(listener) {
    this.#listeners.push(listener);
  }

  /** @returns {Promise<SavedConversation[]>} all conversations, in no particular order */
  async all() {
    const database = await this.#opening;
    return database.getAll(CONVERSATIONS, CONVERSATION_IDS);
  }

  /** @returns {Promise<SavedConversation|undefined>} */
  async get(id) {
    const database = await this.#opening;
    return database.get(CONVERSATIONS, id);
  }

  /**
   * Store a conversation.
   *
   * @param {SavedConversation} conversation
   * @param {[string, object[]]|null} replay - the id of a turn, and the events of its answer, which
   *   are stored as well
   * @returns {Promise<SavedConversation>} what was stored: with the next revision, the title that
   *   it has in the store, and another id if another tab has saved other turns meanwhile
   */
  async save(conversation, replay = null) {
    const { transaction, conversations, replays } = await this.#write();
    const saved = await putSuccessor(conversation, conversations, replays);
    if (replay !== null) {
      const [turnId, events] = replay;
      await replays.put(events, [saved.id, turnId]);
    }
    await transaction.done;
    this.#announce(saved.id);
    return saved;
  }

  /**
   * Leave a conversation for other pages to store, while this one is being closed.
   *
   * Nothing can be awaited then, so what is stored cannot be looked at first.
   */
  leave(conversation) {
    const id = LEFT + newId();
    const transaction = this.#database?.transaction(CONVERSATIONS, "readwrite");
    transaction?.done.catch(() => {});
    transaction?.store.put({ ...conversation, id, conversationId: conversation.id });
    transaction?.commit();
    this.#channel?.postMessage(id);
  }

  /** Store what this page left, since it is shown again; other pages may have done so. */
  async takeUpLeft() {
    await this.#opening;
    await this.#storeLeft();
  }

  /** Return the events of an answer; an empty list if none are stored. */
  async events(id, turnId) {
    const database = await this.#opening;
    return (await database.get(REPLAYS, [id, turnId])) ?? [];
  }

  /** Give a conversation another title; null for the beginning of its first question. */
  async rename(id, title) {
    const { transaction, conversations } = await this.#write();
    const stored = await conversations.get(id);
    if (stored !== undefined) {
      await conversations.put({ ...stored, title });
    }
    await transaction.done;
    this.#announce(id);
  }

  /** @returns {Promise<Backup|null>} null if the conversation is not stored */
  async backup(id) {
    const database = await this.#opening;
    const transaction = database.transaction([CONVERSATIONS, REPLAYS]);
    const conversation = await transaction.objectStore(CONVERSATIONS).get(id);
    if (conversation === undefined) {
      return null;
    }
    const store = transaction.objectStore(REPLAYS);
    const keys = await store.getAllKeys(keysOf(id));
    const events = await store.getAll(keysOf(id));
    return { conversation, replays: keys.map(([, turnId], index) => [turnId, events[index]]) };
  }

  async delete(id) {
    const { transaction, conversations, replays } = await this.#write();
    await conversations.delete(id);
    await replays.delete(keysOf(id));
    await transaction.done;
    this.#announce(id);
  }

  /**
   * Bring a conversation back as it was.
   *
   * @param {Backup} backup
   */
  async restore({ conversation, replays: replaysByTurn }) {
    const { transaction, conversations, replays } = await this.#write();
    const stored = await conversations.get(conversation.id);
    const revision = (stored ?? conversation).revision + 1;
    await conversations.put({ ...conversation, revision });
    await replays.delete(keysOf(conversation.id));
    for (const [turnId, events] of replaysByTurn) {
      await replays.put(events, [conversation.id, turnId]);
    }
    await transaction.done;
    this.#announce(conversation.id);
  }

  async #open() {
    this.#database = await openDB(STORAGE_NAME, VERSION, {
      upgrade(database) {
        database.createObjectStore(CONVERSATIONS, { keyPath: "id" });
        database.createObjectStore(REPLAYS);
      },
    });
    await this.#storeLeft();
    return this.#database;
  }

  // Handle the id that another page has announced.
  #hear(id) {
    if (!id.startsWith(LEFT)) {
      this.#notify(id, true);
    } else if (this.#database !== null) { // whoever opens the database looks for what was left
      this.#storeLeft();
    }
  }

  // Store what pages left when they were closed. If the storage is full, the next page tries again.
  async #storeLeft() {
    try {
      await this.#moveLeft();
    } catch (error) {
      console.warn(error);
    }
  }

  async #moveLeft() {
    const { transaction, conversations, replays } = this.#begin();
    const savedIds = [];
    for (const { conversationId, ...left } of await conversations.getAll(LEFT_IDS)) {
      await conversations.delete(left.id);
      const conversation = { ...left, id: conversationId };
      const saved = await putSuccessor(conversation, conversations, replays);
      savedIds.push(saved.id);
    }
    await transaction.done;
    savedIds.forEach((id) => this.#announce(id));
  }

  async #write() {
    await this.#opening;
    return this.#begin();
  }

  // Begin to change the database, which is open.
  #begin() {
    const transaction = this.#database.transaction([CONVERSATIONS, REPLAYS], "readwrite");
    transaction.done.catch(() => {}); // what failed has its own error
    return {
      transaction,
      conversations: transaction.objectStore(CONVERSATIONS),
      replays: transaction.objectStore(REPLAYS),
    };
  }

  #announce(id) {
    this.#channel?.postMessage(id);
    this.#notify(id, false);
  }

  #notify(id, isFromOtherTab) {
    this.#listeners.forEach((listener) => listener(id, isFromOtherTab));
  }
}

// Firefox blocks channels to other tabs with its storage.
function openChannel() {
  try {
    return new BroadcastChannel(STORAGE_NAME);
  } catch {
    return null;
  }
}

// Store a conversation within a transaction, and return what was stored.
async function putSuccessor(conversation, conversations, replays) {
  const saved = successor(conversation, await conversations.get(conversation.id));
  await conversations.put(saved);
  if (saved.id === conversation.id) {
    await deleteOtherReplays(replays, saved);
  } else {
    await copyReplays(replays, conversation.id, saved);
  }
  return saved;
}

// What is stored in place of `stored`, or next to it.
function successor(conversation, stored) {
  if (stored === undefined) {
    return { ...conversation, revision: conversation.revision + 1 };
  }
  const { title } = stored;
  if (stored.revision !== conversation.revision) {
    // Another tab has saved its turns meanwhile: they stay, and this becomes a copy.
    return { ...conversation, id: newId(), title, revision: 1 };
  }
  return { ...conversation, title, revision: stored.revision + 1 };
}

// Delete the events of turns that the conversation no longer has.
async function deleteOtherReplays(replays, { id, turns }) {
  const turnIds = new Set(turns.map((turn) => turn.id));
  for (const key of await replays.getAllKeys(keysOf(id))) {
    if (!turnIds.has(key[1])) {
      await replays.delete(key);
    }
  }
}

// Give a copied conversation the events of the original's turns.
async function copyReplays(replays, originalId, { id, turns }) {
  for (const turn of turns) {
    const events = await replays.get([originalId, turn.id]);
    if (events !== undefined) {
      await replays.put(events, [id, turn.id]);
    }
  }
}

// The keys of all events of a conversation: a list is greater than any text.
function keysOf(id) {
  return IDBKeyRange.bound([id], [id, []]);
}
