// What each token is: the kinds that the terminal shows too (specgen/events.py).

export const MEANINGS = {
  accepted: "drafted, and kept by the target model",
  corrected: "chosen by the target where it refused the draft",
  bonus: "chosen by the target after it kept the whole draft",
  plain: "chosen by the target without a draft",
  forced: "the only token that the grammar allows",
};
const LEGEND = ["accepted", "corrected", "bonus", "plain"];
const DRAFTERS = { model: "the draft model", ngram: "n-grams" };

// A token as it is shown. Its text is a text node: whatever it says, it is no markup.
export function tokenElement(piece) {
  const kind = Object.hasOwn(MEANINGS, piece.kind) ? piece.kind : "plain";
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = piece.text;
  element.title = `${kind}: ${MEANINGS[kind]}`;
  if (kind === "accepted" && piece.origin) {
    element.title += ` (drafted by ${DRAFTERS[piece.origin] ?? piece.origin})`;
  }
  return element;
}

// The kinds, each as it looks; unfolded, with what they mean.
export function fillLegend(details) {
  for (const kind of LEGEND) {
    details.querySelector("summary").append(word("span", kind, kind));
    details.querySelector("dl").append(word("dt", kind, kind), word("dd", MEANINGS[kind]));
  }
}

function word(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}
