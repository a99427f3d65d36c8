import { ConversationRow } from "./conversation_row.js";
import { ConversationSummary } from "./conversation_summary.js";
import { counted } from "./format.js";
import { TextSearch } from "./text_search.js";

const NOTHING_YET = "Your conversations are listed here. Only this browser stores them.";

/** The list of conversations, the latest first, and its search. */
export class ConversationList {
  #store;
  #rows = new Map();
  #summaries = new Map();
  #currentId = null;
  // The ids of the conversations whose answer is arriving.
  #answeringIds = new Set();
  #list = document.getElementById("rows");
  #field = document.getElementById("search");
  #status = document.getElementById("list-status");

  /** @param {import("./conversation_store.js").ConversationStore} store */
  constructor(store) {
    this.#store = store;
    this.#field.addEventListener("input", () => this.#show());
    this.#field.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#field.value !== "") {
        event.preventDefault();
        event.stopPropagation(); // it would also stop an answer, or close the list
        this.#field.value = "";
        this.#show();
      }
    });
  }

  /** Show all stored conversations. */
  async fill() {
    const all = await this.#store.all();
    this.#summaries = new Map(all.map((saved) => [saved.id, new ConversationSummary(saved)]));
    this.#show();
  }

  /** Show a conversation as it is stored now. */
  async refresh(id) {
    const saved = await this.#store.get(id);
    if (saved === undefined) {
      this.#summaries.delete(id);
      this.#rows.delete(id);
    } else {
      this.#summaries.set(id, new ConversationSummary(saved));
    }
    this.#show();
  }

  /** Mark the conversation that the page shows. */
  setCurrent(id) {
    this.#currentId = id;
    this.#show();
  }

  /** Mark the conversations whose answer is arriving. */
  setAnswering(ids) {
    this.#answeringIds = new Set(ids);
    this.#show();
  }

  /** Return the id of the conversation in whose row an element is, and close the row's menu. */
  takeAction(element) {
    const { id } = element.closest("[data-id]").dataset;
    this.#rows.get(id).closeMenu();
    return id;
  }

  /** Return the title of a conversation. */
  titleOf(id) {
    return this.#summaries.get(id).title;
  }

  #show() {
    const search = new TextSearch(this.#field.value);
    const found = [...this.#summaries.values()].filter((summary) => summary.matches(search));
    found.sort((a, b) => b.changedMs - a.changedMs);
    this.#place(found.map((summary) => this.#rowOf(summary, search)));
    this.#status.textContent = this.#statusText(search, found.length);
  }

  #statusText(search, nFound) {
    if (this.#summaries.size === 0) {
      return NOTHING_YET;
    }
    if (search.isEmpty) {
      return "";
    }
    return nFound === 0 ? "No conversation has these words." : counted(nFound, "conversation");
  }

  #rowOf(summary, search) {
    const { id } = summary;
    let row = this.#rows.get(id);
    if (row === undefined) {
      row = new ConversationRow(id, (title) => this.#store.rename(id, title));
      this.#rows.set(id, row);
    }
    row.show(summary, search, this.#answeringIds.has(id));
    row.setCurrent(id === this.#currentId);
    return row;
  }

  // Put rows into the list in this order. Those that are in their place stay, and keep the focus.
  #place(rows) {
    const elements = new Set(rows.map(({ element }) => element));
    [...this.#list.children]
      .filter((element) => !elements.has(element))
      .forEach((element) => element.remove());
    let next = this.#list.firstElementChild;
    for (const element of elements) {
      if (element === next) {
        next = next.nextElementSibling;
      } else {
        this.#list.insertBefore(element, next);
      }
    }
  }
}
