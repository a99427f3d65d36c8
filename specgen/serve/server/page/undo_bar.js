// The line that tells what was deleted or replaced, and takes it back.

const bar = document.getElementById("undo-bar");
const explanation = bar.querySelector("span");
const undoButton = bar.querySelector(".undo");

// What can be undone: the id of the conversation, and a function. Null if there is nothing.
let offer = null;

undoButton.addEventListener("click", () => {
  const { undo } = offer;
  close();
  undo();
});
bar.querySelector(".dismiss").addEventListener("click", close);

/**
 * Offer to undo a change, until the user does it, dismisses the offer, or gets another one.
 *
 * @param {string} text - tells what was changed
 * @param {string} conversationId - the conversation that was changed
 * @param {function(): void} undo
 */
export function offerUndo(text, conversationId, undo) {
  offer = { conversationId, undo };
  explanation.textContent = text;
  bar.hidden = false;
}

/** Withdraw the offer if it is about this conversation, because undoing would lose later turns. */
export function withdrawUndo(conversationId) {
  if (offer?.conversationId === conversationId) {
    close();
  }
}

/** Put the focus on the button, if the element that had it is gone. */
export function focusUndo() {
  undoButton.focus();
}

function close() {
  const hadFocus = bar.contains(document.activeElement);
  offer = null;
  explanation.textContent = "";
  bar.hidden = true;
  if (hadFocus) {
    document.getElementById("question").focus();
  }
}
