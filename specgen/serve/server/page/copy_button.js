import { copyText } from "./clipboard.js";

// The label of a button after it has copied something.
const COPIED = "Copied";
// The time for which the button has that label.
const COPIED_MS = 1500;

/** Copy a text, and let the button tell so for a moment. */
export async function copyFor(button, text) {
  await copyText(text);
  const label = button.textContent;
  if (label === COPIED) {
    return; // it was clicked before, and gets its label back soon
  }
  button.textContent = COPIED;
  setTimeout(() => {
    button.textContent = label;
  }, COPIED_MS);
}
