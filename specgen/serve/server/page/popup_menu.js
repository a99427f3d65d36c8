/** A menu that opens where the user asks for it. A choice, Escape or leaving it closes it. */
export class PopupMenu {
  #element;
  #button;
  // The element that gets the focus back when the menu is closed.
  #opener = null;

  /**
   * @param {HTMLElement} element - the menu, which contains its items
   * @param {HTMLButtonElement} button - opens the menu below itself, and closes it
   */
  constructor(element, button) {
    this.#element = element;
    this.#button = button;
    this.#showState();
    button.addEventListener("click", () => this.#toggle());
    element.addEventListener("keydown", (event) => this.#handleKey(event));
    element.addEventListener("focusout", ({ relatedTarget }) => {
      const isInside = element.contains(relatedTarget);
      if (!isInside && relatedTarget !== button) { // a click on the button will close it
        this.close();
      }
    });
  }

  /**
   * Open the menu with its corner at a place of the window, and move the focus into it.
   *
   * @param {HTMLElement} opener - gets the focus back
   */
  openAt(x, y, opener) {
    this.#opener = opener;
    this.#element.style.setProperty("--x", `${x}px`);
    this.#element.style.setProperty("--y", `${y}px`);
    this.#element.hidden = false;
    this.#showState();
    this.#items[0].focus();
  }

  close() {
    const hadFocus = this.#element.contains(document.activeElement);
    this.#element.hidden = true;
    this.#showState();
    if (hadFocus) {
      this.#opener.focus();
    }
  }

  get #items() {
    return [...this.#element.querySelectorAll("[role=menuitem]")];
  }

  #toggle() {
    if (!this.#element.hidden) {
      this.close();
      return;
    }
    const { left, bottom } = this.#button.getBoundingClientRect();
    this.openAt(left, bottom, this.#button);
  }

  #showState() {
    this.#button.ariaExpanded = String(!this.#element.hidden);
  }

  #handleKey(event) {
    if (event.key === "Escape") {
      event.stopPropagation(); // it would also stop an answer, or close the list
      this.close();
    } else if (event.key === "Tab") {
      this.close(); // the browser then goes on from the element that has the focus again
    } else {
      this.#moveFocus(event);
    }
  }

  #moveFocus(event) {
    const items = this.#items;
    const place = items.indexOf(document.activeElement);
    const places = {
      ArrowDown: (place + 1) % items.length,
      ArrowUp: (place + items.length - 1) % items.length,
      Home: 0,
      End: items.length - 1,
    };
    if (event.key in places) {
      event.preventDefault(); // it would also scroll the list
      items[places[event.key]].focus();
    }
  }
}
