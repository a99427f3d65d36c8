// Sentences about a token: who chose it, and why.

import { shownText } from "./token_text.js";
import { drafterName } from "./tokens.js";

/**
 * Return why a token is in the answer.
 *
 * @param {import("./answer_positions.js").Position} position
 * @param {number} temperature
 */
export function reasonOf(position, temperature) {
  const { piece, guesses, node, nBefore, reason } = position;
  switch (piece.kind) {
    case "accepted":
      return `${capitalized(drafterName(node.origin))} guessed it${share(node)}, and the target ` +
        `model accepted it${acceptedBecause(temperature)}.`;
    case "corrected":
      return `${guessSentence(guesses)} The target model chose ${shownText(piece.text)} ` +
        `instead: ${rejectedBecause(temperature)}.`;
    case "bonus":
      return `The draft ended before this token. The target model chose it in the same pass in ` +
        `which it accepted ${nBefore === 1 ? "the drafted token" : "all drafted tokens"}.`;
    case "forced":
      return "It is the only token that the grammar allows here.";
    default:
      return plainReason(reason);
  }
}

function plainReason(reason) {
  if (reason === null) {
    return "The target model chose it right after it had read the prompt.";
  }
  return `The target model chose it. Nothing was drafted: ${reason}.`;
}

// Several guesses are the branches of a tree.
function guessSentence(guesses) {
  const texts = guesses.map((node) => `${shownText(node.text)}${share(node)}`);
  const last = texts.pop();
  const all = texts.length === 0 ? last : `${texts.join(", ")} and ${last}`;
  return `${capitalized(drafterName(guesses[0].origin))} guessed ${all}.`;
}

// The probability that the drafter gave a guess, if it gives any.
function share({ probability }) {
  return probability === null ? "" : ` (${percentText(probability)})`;
}

function acceptedBecause(temperature) {
  return temperature === 0 ? ", because it is also its own choice" : "";
}

function rejectedBecause(temperature) {
  if (temperature === 0) {
    return "at temperature 0, only its most likely token is accepted";
  }
  return (
    `at temperature ${temperature} it accepts a guess only as often as it would choose that ` +
    "token itself"
  );
}

/**
 * Return what the target gives the token and the guesses, as a sentence.
 *
 * @param {import("./answer_positions.js").Position} position
 * @param {object} score - the server's entry for the token
 */
export function targetSentence({ piece, guesses }, score) {
  const own = `${shownText(piece.text)} ${percentText(Math.exp(score.logprob))}`;
  const others = guesses.flatMap((node) => {
    const entry = score.top_logprobs.find(({ id }) => id === node.token_id);
    return entry === undefined
      ? []
      : [`${shownText(node.text)} ${percentText(Math.exp(entry.logprob))}`];
  });
  return `The target model gives ${[own, ...others].join(", and ")}.`;
}

/** Return a probability as text; small ones keep a digit. */
export function percentText(probability) {
  if (probability < 0.001) {
    return "less than 0.1%";
  }
  const nDigits = probability < 0.1 || (probability > 0.99 && probability < 1) ? 1 : 0;
  return `${(100 * probability).toFixed(nDigits)}%`;
}

function capitalized(text) {
  return text[0].toUpperCase() + text.slice(1);
}
