// Tables of the tokens that were likely at a position of an answer.

import { percentText } from "./token_reasons.js";
import { visible } from "./token_text.js";

const NO_DRAFT = "There is no draft model.";
const NGRAMS = "N-grams have no probabilities: an earlier text went on like this.";
const NOT_COMPUTED = "The probabilities of this draft cannot be computed afterwards.";

/**
 * Return the elements that show what was likely to the target and to the draft model.
 *
 * @param {object} scores - the server's scores of an answer
 * @param {number} number - the position in the answer
 * @param {object[]} guesses - the nodes that were drafted there and not accepted
 */
export function likelyElements(scores, number, guesses) {
  const score = scores.tokens[number];
  const { top_logprobs: target, draft_top_logprobs: draft } = score;
  const targetTable = likelyTable("Target model", target, score, guesses.map(textOf));
  if (draft === null) {
    return [targetTable, noteElement(whyNoDraft(scores.draft))];
  }
  const ofModel = guesses.filter(({ origin }) => origin === "model");
  return [targetTable, likelyTable("Draft model", draft, score, ofModel.map(textOf))];
}

function textOf({ text }) {
  return text;
}

function whyNoDraft(draft) {
  switch (draft) {
    case "none":
      return NO_DRAFT;
    case "ngram":
      return NGRAMS;
    default:
      return NOT_COMPUTED;
  }
}

// The draft model may have other tokens than the target, so texts are compared, and not numbers.
function likelyTable(title, entries, score, guessedTexts) {
  const table = document.createElement("table");
  table.createCaption().textContent = title;
  for (const entry of entries) {
    const row = tokenRow(entry);
    if (entry.token === score.token) {
      setRole(row, "chosen", "in the answer");
    } else if (guessedTexts.includes(entry.token)) {
      setRole(row, "guessed", "guessed");
    }
    table.append(row);
  }
  return table;
}

function tokenRow({ token, logprob }) {
  const text = document.createElement("code");
  text.textContent = visible(token);
  const row = document.createElement("tr");
  row.insertCell().append(text);
  const share = row.insertCell();
  share.textContent = percentText(Math.exp(logprob));
  share.style.setProperty("--share", Math.exp(logprob));
  return row;
}

function setRole(row, className, label) {
  row.className = className;
  const role = document.createElement("span");
  role.className = "role";
  role.textContent = ` ${label}`;
  row.cells[0].append(role);
}

function noteElement(text) {
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = text;
  return note;
}
