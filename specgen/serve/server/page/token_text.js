/** Return a token's text in quotation marks, with white space that can be seen. */
export function shownText(text) {
  return `“${visibleText(text)}”`;
}

/** Return a token's text with white space that can be seen. */
export function visibleText(text) {
  if (text === "") {
    return "end of text";
  }
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, toOpenBoxes);
}

function toOpenBoxes(spaces) {
  return "␣".repeat(spaces.length);
}
