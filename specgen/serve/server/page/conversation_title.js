// The beginning of a title: up to 60 characters, and not half of one.
const BEGINNING = /^.{0,60}/su;

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
  const [start] = BEGINNING.exec(text);
  if (start.length === text.length) {
    return text;
  }
  return `${start.replace(/\s+\S*$/, "")} …`;
}
