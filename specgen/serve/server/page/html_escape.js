/** Return a text with the characters that HTML reserves written as references. */
export function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
