const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key");
const explanation = document.getElementById("key-why");

/**
 * Ask the user for an API key.
 *
 * @param {boolean} isRejected - whether the server has rejected the last one
 * @returns {Promise<string|null>} the key; null if the user cancels
 */
export function askForKey(isRejected) {
  explanation.textContent = isRejected
    ? "The server rejected this API key. Enter another one:"
    : "The server requires an API key:";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const answer = () => resolve(dialog.returnValue === "use" ? input.value : null);
    dialog.addEventListener("close", answer, { once: true });
  });
}
