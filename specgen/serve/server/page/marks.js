// What each token is: the kinds that the terminal shows too (specgen/events.py), and rejected ones.

export const MEANINGS = {
  accepted: "drafted, and kept by the target model",
  rejected: "drafted, and refused by the target",
  corrected: "chosen by the target where it refused the draft",
  bonus: "chosen by the target after it kept the whole draft",
  plain: "chosen by the target without a draft",
  forced: "the only token that the grammar allows",
};
const LEGEND = ["accepted", "rejected", "corrected", "bonus", "plain"];
const DRAFTERS = { model: "the draft model", ngram: "n-grams" };
// How far a line is looked for: markup such as an address stands between, but a jump to another place
// would leave all tokens in between without a mark. A word, where Markdown changed a line as in `&amp;`.
const FAR = 500;
const NEAR = 40;

// The tokens of a round's events, in the order of the text. What was rejected stands before what the
// target chose instead, and is no part of the text.
export function piecesOf(events) {
  const pieces = [];
  let refused = [];
  for (const event of events) {
    if (event.event === "verified") {
      refused = event.rejected.map(({ text }) => ({ text, kind: "rejected" }));
    } else if (event.event === "committed") {
      const kept = event.pieces.findLastIndex(({ kind }) => kind === "accepted") + 1;
      pieces.push(...event.pieces.slice(0, kept), ...refused, ...event.pieces.slice(kept));
      refused = [];
    }
  }
  return pieces;
}

export function textOf(pieces) {
  return pieces.map(({ text, kind }) => (kind === "rejected" ? "" : text)).join("");
}

// Mark each token in what was rendered of `text`, a part of the tokens' own text. Characters of the
// text's markup are shown nowhere; what the rendering made of others keeps its place only nearby.
export function markTokens(root, text, pieces) {
  const whole = textOf(pieces);
  const pen = new Pen(pieces, Math.max(0, whole.lastIndexOf(text)));
  const nodes = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    nodes.push(walker.currentNode);
  }
  let end = root;
  for (const node of nodes) {
    if (!node.data.trim() || node.parentNode.tagName === "BUTTON") {
      continue;
    }
    end = node.parentNode;
    node.replaceWith(...node.data.split(/(?<=\n)/).flatMap((line) => {
      const place = whole.indexOf(line, pen.at);
      return place >= 0 && place < pen.at + FAR ? pen.write(place, line.length) : line.split(/(?<=\s)|(?=\s)/).flatMap((word) => {
        const near = whole.slice(pen.at, pen.at + NEAR + word.length).indexOf(word);
        return near >= 0 ? pen.write(pen.at + near, word.length) : [word];
      });
    }));
  }
  end.append(...pen.write(whole.length, 0)); // what was rejected behind the last character
}

// Goes through the tokens once, from the character `at` on.
class Pen {
  #pieces;
  #number = 0;
  #start = 0; // of the token with this number

  constructor(pieces, at) {
    this.at = at;
    this.#pieces = pieces;
  }

  // The elements of the `length` characters from `place` on.
  write(place, length) {
    const found = [];
    for (const end = place + length; this.#number < this.#pieces.length; this.#number += 1) {
      const piece = this.#pieces[this.#number];
      if (piece.kind === "rejected") {
        found.push(...(this.#start >= this.at ? [rejectedElement(piece)] : []));
        continue;
      }
      const stop = this.#start + piece.text.length;
      const part = piece.text.slice(Math.max(0, place - this.#start), Math.max(0, end - this.#start));
      const [space] = /^\s*/.exec(part); // indentation has no colour
      found.push(space, ...(part.length > space.length ? [tokenElement(piece, part.slice(space.length))] : []));
      if (stop > end) {
        break;
      }
      this.#start = stop;
    }
    this.at = place + length;
    return found;
  }
}

// A token as it is shown. Its text is a text node: whatever it says, it is no markup.
function tokenElement({ kind: said, origin, logprob }, text) {
  const kind = Object.hasOwn(MEANINGS, said) ? said : "plain";
  const element = word("span", text, kind);
  element.title = `${kind}: ${MEANINGS[kind]}`;
  if (kind === "accepted" && origin) {
    element.title += ` (drafted by ${DRAFTERS[origin] ?? origin})`;
  }
  if (typeof logprob === "number") {
    element.title += `; the target gave it ${Math.round(100 * Math.exp(logprob))}%`;
  }
  return element;
}

// Its text is no content: nobody copies what the answer does not say.
function rejectedElement({ text }) {
  const element = word("span", "", "rejected");
  element.dataset.text = text.replace(/\s*\n\s*/g, "↵").replace(/\s+/g, " ");
  element.title = `rejected: ${MEANINGS.rejected}`;
  return element;
}

// The kinds, each as it looks; unfolded, with what they mean.
export function fillLegend(details) {
  for (const kind of LEGEND) {
    details.querySelector("summary").append(word("span", kind, `${kind} kind`));
    details.querySelector("dl").append(word("dt", kind, kind), word("dd", MEANINGS[kind]));
  }
}

function word(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}
