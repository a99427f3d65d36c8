// Sentences about a token of an answer: who chose it, and why.

import { END } from "./answer_positions.js";
import { quoted } from "./token_text.js";
import { drafterName } from "./tokens.js";

// The largest difference between two probabilities that are shown as nearly the same.
const SAME_PROBABILITY = 0.02;

/**
 * Return why a token is in the answer.
 *
 * @param {import("./answer_positions.js").Position} position
 * @param {number} temperature
 */
export function reasonOf({ piece, text, guesses, node, nBefore, reason }, temperature) {
  switch (piece.kind) {
    case "accepted":
      return acceptedReason(piece.origin, node, temperature);
    case "corrected":
      return `${guessSentence(guesses)} ${correction(text, guesses.length, temperature)}`;
    case "bonus":
      return bonusReason(nBefore);
    case "forced":
      return "It is the only token that the grammar allows here.";
    default:
      return plainReason(reason);
  }
}

function acceptedReason(origin, node, temperature) {
  const guess = `${capitalized(drafterName(origin))} guessed it${share(node)}`;
  const isGreedy = temperature === 0;
  const why = isGreedy ? ", because it is also the target's most likely token" : "";
  return `${guess}, and the target model accepted the guess${why}.`;
}

// Several guesses are the branches of a tree.
function guessSentence(guesses) {
  const drafter = capitalized(drafterName(guesses[0].origin));
  const texts = guesses.map((node) => `${quoted(node.text || END)}${share(node)}`);
  return `${drafter} guessed ${enumeration(texts)}.`;
}

function correction(text, nGuesses, temperature) {
  const guessed = nGuesses === 1 ? "that" : "them";
  const choice = `The target model rejected ${guessed} and chose ${quoted(text)}`;
  if (temperature === 0) {
    return `${choice}: at temperature 0, only its most likely token is accepted.`;
  }
  return (
    `${choice}: at temperature ${temperature}, it accepts a guess only as often as it would ` +
    "choose that token itself."
  );
}

function bonusReason(nBefore) {
  const draft = nBefore === 1 ? "the drafted token" : `all ${nBefore} drafted tokens`;
  return `The target model accepted ${draft} before it, and chose this one in the same pass.`;
}

function plainReason(reason) {
  if (reason === null) {
    return "The target model chose it right after the prefill of the prompt.";
  }
  return `The target model chose it. Nothing was drafted here: ${reason}.`;
}

// The probability that the drafter gave a guess, if it gives any.
function share(node) {
  const probability = node?.probability ?? null;
  return probability === null ? "" : ` (${percentText(probability)})`;
}

/**
 * Return how likely a token and the guesses were to the target, as a sentence.
 *
 * @param {import("./answer_positions.js").Position} position
 * @param {object} score - the server's entry for the token
 */
export function likelihoodSentence({ text, guesses }, score) {
  const shares = [`${quoted(text)} ${percentText(Math.exp(score.logprob))}`];
  for (const guess of guesses) {
    const entry = score.top_logprobs.find(({ id }) => id === guess.token_id);
    if (entry !== undefined) {
      shares.push(`${quoted(guess.text || END)} ${percentText(Math.exp(entry.logprob))}`);
    }
  }
  return `The target model gives ${enumeration(shares)}.`;
}

/**
 * Return whether the draft model would guess something else after the whole text.
 *
 * When it guessed, it may have read less. Then its probability of the guess was another one.
 *
 * @param {import("./answer_positions.js").Position} position
 * @param {object} score - the server's entry for the token
 */
export function guessedOtherwise({ guesses, node }, { draft_top_logprobs: entries }) {
  const guess = [node, ...guesses].find((each) => each?.origin === "model");
  const probabilityThen = guess?.probability ?? null;
  if (probabilityThen === null || entries === null) {
    return false;
  }
  const entry = entries.find(({ token }) => token === guess.text);
  const probabilityNow = entry === undefined ? 0 : Math.exp(entry.logprob);
  return Math.abs(probabilityNow - probabilityThen) > SAME_PROBABILITY;
}

/** Return a probability as text. */
export function percentText(probability) {
  if (probability < 0.001) {
    return "under 0.1%";
  }
  if (probability > 0.999) {
    return "over 99.9%";
  }
  const isNearEnd = probability < 0.1 || probability > 0.99;
  return `${(100 * probability).toFixed(isNearEnd ? 1 : 0)}%`;
}

function enumeration(texts) {
  const first = texts.slice(0, -1);
  return first.length === 0 ? texts[0] : `${first.join(", ")} and ${texts.at(-1)}`;
}

function capitalized(text) {
  return text[0].toUpperCase() + text.slice(1);
}
