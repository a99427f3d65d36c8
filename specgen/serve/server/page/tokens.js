// The tokens of an answer, and what each kind of token looks like and means. The words and colours
// are those of the terminal (specgen/render/rows.py).

/**
 * A token to be shown.
 *
 * @typedef {object} Token
 * @property {string} text
 * @property {string} kind - one of the names in MEANINGS
 * @property {string} [origin] - the drafter of an accepted token
 * @property {number} [logprob] - natural logarithm of the target's probability, if it was requested
 */

const MEANINGS = {
  accepted: "drafted, and accepted by the target model",
  rejected: "drafted, but rejected by the target model",
  corrected: "chosen by the target model where it rejected the draft",
  bonus: "chosen by the target model after it accepted the whole draft",
  forced: "the only token that the grammar allows",
  plain: "chosen by the target model without a draft",
};

// The kinds in the legend. Only grammars force tokens, and the page asks for none.
const LEGEND = ["accepted", "rejected", "corrected", "bonus", "plain"];
const HINT = "Click a token to see what was drafted there, and how likely it was.";
const DRAFTERS = { model: "the draft model", ngram: "n-grams (earlier text)" };

/** Return what a drafter is called, by the origin of its tokens. */
export function drafterName(origin) {
  return DRAFTERS[origin] ?? origin;
}

/**
 * Return the tokens of a generation's events, in the order of the text.
 *
 * Rejected tokens come before what the target chose instead of them. They are not part of the text.
 *
 * @returns {Token[]}
 */
export function tokensOf(events) {
  const tokens = [];
  let rejected = [];
  for (const event of events) {
    if (event.event === "verified") {
      rejected = event.rejected.map(({ text }) => ({ text, kind: "rejected" }));
    } else if (event.event === "committed") {
      const nAccepted = event.pieces.findLastIndex(({ kind }) => kind === "accepted") + 1;
      tokens.push(...event.pieces.slice(0, nAccepted));
      tokens.push(...rejected);
      tokens.push(...event.pieces.slice(nAccepted));
      rejected = [];
    }
  }
  return tokens;
}

/** Return the text that tokens add to the answer. */
export function textOf(tokens) {
  const committed = tokens.filter(({ kind }) => kind !== "rejected");
  return committed.map(({ text }) => text).join("");
}

/**
 * Return an element that shows `text`, a part of a token's text.
 *
 * The text becomes a text node: whatever the model writes, it is never parsed as HTML.
 */
export function tokenElement(token, text) {
  const kind = Object.hasOwn(MEANINGS, token.kind) ? token.kind : "plain";
  const element = textElement("span", text, kind);
  element.title = `${kind}: ${MEANINGS[kind]}`;
  if (kind === "accepted" && token.origin) {
    element.title += ` (drafted by ${drafterName(token.origin)})`;
  }
  if (typeof token.logprob === "number") {
    element.title += `; the target gave it ${Math.round(100 * Math.exp(token.logprob))}%`;
  }
  return element;
}

/**
 * Return an element that shows a rejected token.
 *
 * The style sheet shows its text, so that it is not copied with the answer.
 */
export function rejectedElement({ text }) {
  const element = textElement("span", "", "rejected");
  element.dataset.text = text.replace(/\s*\n\s*/g, "↵").replace(/\s+/g, " ");
  element.title = `rejected: ${MEANINGS.rejected}`;
  return element;
}

/** Fill a legend: its summary names the kinds of tokens, and its list explains them. */
export function fillLegend(legend) {
  const summary = legend.querySelector("summary");
  const list = legend.querySelector("dl");
  for (const kind of LEGEND) {
    summary.append(textElement("span", kind, kind));
    list.append(textElement("dt", kind, kind));
    list.append(textElement("dd", MEANINGS[kind], ""));
  }
  list.after(textElement("p", HINT, "note"));
}

function textElement(tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}
