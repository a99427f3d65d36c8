/** Whether a key sends what is written: Enter alone, but not the one that ends a composition. */
export function isSubmitKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}
