import { dateText } from "./format.js";
import { PopupMenu } from "./popup_menu.js";

/** A conversation in the list: a link to it, and a menu of what can be done with it. */
export class ConversationRow {
  #link;
  #menuElement;
  #menuButton;
  #menu;

  /**
   * @param {string} id - of the conversation
   * @param {function(string|null): void} rename - called with another title; null for the beginning
   *   of the first question
   */
  constructor(id, rename) {
    this.element = document.getElementById("row").content.firstElementChild.cloneNode(true);
    this.element.dataset.id = id;
    this.#link = this.element.querySelector("a");
    this.#link.href = `#${id}`;
    this.#menuElement = this.element.querySelector(".menu");
    this.#menuButton = this.element.querySelector(".open-menu");
    this.#menu = new PopupMenu(this.#menuElement, this.#menuButton);
    this.element.querySelector(".rename").addEventListener("click", () => this.#rename(rename));
    // By a right click, by a key, and on many phones by a long touch.
    this.element.addEventListener("contextmenu", (event) => this.#openMenu(event));
  }

  /**
   * Show a summary, with what was found in it, or that its answer is arriving.
   *
   * @param {import("./conversation_summary.js").ConversationSummary} summary
   * @param {import("./text_search.js").TextSearch} search
   * @param {boolean} isAnswering
   */
  show(summary, search, isAnswering) {
    const when = isAnswering ? "answering …" : dateText(summary.changedMs);
    this.#part("title").replaceChildren(...search.marked(summary.title));
    this.#link.title = summary.title;
    this.#part("excerpt").replaceChildren(...search.marked(summary.excerpt(search)));
    this.#part("when").textContent = when;
    this.#menuElement.ariaLabel = summary.title;
    this.#menuButton.ariaLabel = `Actions for “${summary.title}”`;
  }

  setCurrent(isCurrent) {
    if (isCurrent) {
      this.#link.setAttribute("aria-current", "page");
    } else {
      this.#link.removeAttribute("aria-current");
    }
  }

  closeMenu() {
    this.#menu.close();
  }

  #openMenu(event) {
    const opener = event.target.closest("a, .open-menu");
    if (opener !== null) { // the field for another title has the browser's menu
      event.preventDefault();
      this.#menu.openAt(event.clientX, event.clientY, opener);
    }
  }

  // Let the user type another title in place of this one. Leaving the field is as good as Enter.
  #rename(rename) {
    const former = this.#part("title").textContent;
    const field = document.createElement("input");
    field.ariaLabel = "Title";
    field.value = former;
    this.closeMenu();
    this.#link.replaceWith(field);
    field.focus();
    field.select();
    const end = (title) => {
      const hadFocus = document.activeElement === field;
      field.removeEventListener("blur", leave);
      field.replaceWith(this.#link);
      if (hadFocus) {
        this.#link.focus();
      }
      if (title !== former) {
        rename(title === "" ? null : title);
      }
    };
    const leave = () => end(field.value.trim());
    field.addEventListener("blur", leave);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        leave();
      } else if (event.key === "Escape") {
        event.stopPropagation(); // it would also stop an answer, or close the list
        end(former);
      }
    });
  }

  #part(name) {
    return this.#link.querySelector(`.${name}`);
  }
}
