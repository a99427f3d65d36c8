const MAX_LENGTH = 60;

/**
 * Return the title of a conversation: the user's, or the beginning of the first question.
 *
 * @param {{title: string|null, turns: import("./turn.js").SavedTurn[]}} conversation
 */
export function titleOf({ title, turns }) {
  if (title !== null) {
    return title;
  }
  const [first] = turns;
  const line = first?.question.trim().split("\n")[0] ?? "";
  return shortened(line || first?.attachments?.[0]?.name || "Empty conversation");
}

// The beginning of a text, up to the end of a word.
function shortened(text) {
  if (text.length <= MAX_LENGTH) {
    return text;
  }
  const start = text.slice(0, MAX_LENGTH);
  return `${start.replace(/\s+\S*$/, "")} …`;
}
