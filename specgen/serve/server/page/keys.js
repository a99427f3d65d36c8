// The code of a key that the input method has handled.
const KEY_OF_INPUT_METHOD = 229;

/** Whether a key sends what is written: Enter alone, but not the one that ends a composition. */
export function isSubmitKey(event) {
  // In Safari, the composition has already ended when its last key is reported.
  const isOfComposition = event.isComposing || event.keyCode === KEY_OF_INPUT_METHOD;
  return event.key === "Enter" && !event.shiftKey && !isOfComposition;
}
