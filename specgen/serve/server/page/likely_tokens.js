// Tables of the tokens that were likely at a position of an answer.

import { percentText } from "./token_reasons.js";
import { visible } from "./token_text.js";

const NO_DRAFT = "There is no draft model.";
const NGRAMS = "N-grams have no probabilities: an earlier text went on like this.";
const NOT_COMPUTED = "The probabilities of this draft cannot be computed afterwards.";
const WITHIN = "None of the draft model's own tokens begins here.";

/**
 * Return the elements that show what was likely to the target and to the draft model.
 *
 * @param {object} scores - the server's scores of an answer
 * @param {number} number - the position in the answer
 * @param {number[]} guessIds - the tokens that were drafted there and not accepted
 */
export function likelyElements(scores, number, guessIds) {
  const score = scores.tokens[number];
  const { id, bytes, top_logprobs: target, draft_top_logprobs: draft } = score;
  const isOwn = (entry) => entry.id === id && String(entry.bytes) === String(bytes);
  // A draft model may have other tokens, with other numbers.
  const isOwnText = (entry) => bytes.length > 0 && String(entry.bytes) === String(bytes);
  const isGuess = (entry) => guessIds.includes(entry.id);
  const targetTable = likelyTable("Target model", target, isOwn, isGuess);
  if (draft === null) {
    return [targetTable, noteElement(whyNoDraft(scores))];
  }
  const hasOwnTokens = scores.tokens.some(({ draft_top_logprobs: entries }) => entries === null);
  const draftTable = hasOwnTokens
    ? likelyTable("Draft model", draft, isOwnText, () => false)
    : likelyTable("Draft model", draft, isOwn, isGuess);
  return [targetTable, draftTable];
}

function whyNoDraft({ draft, tokens }) {
  if (draft === "none") {
    return NO_DRAFT;
  }
  if (draft === "ngram") {
    return NGRAMS;
  }
  const isKnownElsewhere = tokens.some(({ draft_top_logprobs: entries }) => entries !== null);
  return isKnownElsewhere ? WITHIN : NOT_COMPUTED;
}

function likelyTable(title, entries, isOwn, isGuess) {
  const table = document.createElement("table");
  const caption = document.createElement("caption");
  caption.textContent = title;
  table.append(caption);
  for (const entry of entries) {
    const row = tokenRow(entry);
    if (isOwn(entry)) {
      setRole(row, "chosen", "in the answer");
    } else if (isGuess(entry)) {
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
