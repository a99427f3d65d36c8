// Tokens as texts in which white space can be seen.

/** Return a token's text in quotation marks. */
export function quoted(text) {
  return `“${visible(text)}”`;
}

export function visible(text) {
  const withSigns = text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return withSigns.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
