// What happened at each position of an answer, from its events.

export const END = "end of text";
const PART_OF_CHARACTER = "part of a character";

/**
 * A token of an answer, and what was drafted in its place.
 *
 * @typedef {object} Position
 * @property {object} piece - the token, as in a "committed" event
 * @property {string} text - the text of the token; what it is if it has none
 * @property {boolean} isEnd - whether it is the end-of-text token, which is not counted
 * @property {object[]} guesses - the nodes of the draft at this position that were not accepted
 * @property {object|null} node - the node that was accepted
 * @property {number} nBefore - the number of accepted tokens before this one in the same round
 * @property {string|null} reason - why the round drafted as much as it did; null outside rounds
 */

/**
 * Return the positions of an answer, including its end.
 *
 * @param {object[]} events
 * @returns {Position[]}
 */
export function positionsOf(events) {
  const positions = [];
  let nodes = [];
  let accepted = [];
  let nTokens = 0;
  for (const event of events) {
    if (event.event === "drafted") {
      nodes = event.nodes;
    } else if (event.event === "verified") {
      accepted = event.accepted;
    } else if (event.event === "committed") {
      positions.push(...positionsOfRound(event, nodes, accepted));
      nTokens = event.n_tokens;
      nodes = [];
      accepted = [];
    }
  }
  // The end-of-text token is the last one, has no text, and is not counted.
  const last = positions.at(-1);
  if (last?.piece.text === "" && positions.length > nTokens) {
    last.text = END;
    last.isEnd = true;
  }
  return positions;
}

function positionsOfRound({ pieces, reason_text: reason = null }, nodes, accepted) {
  return pieces.map((piece, place) => {
    const ownIndex = accepted[place] ?? -1;
    // Tokens after the target's own one were forced by the grammar, and nothing was drafted there.
    const parent = place > accepted.length ? null : (accepted[place - 1] ?? -1);
    const isGuess = (node, index) => node.parent === parent && index !== ownIndex;
    return {
      piece,
      text: piece.text === "" ? PART_OF_CHARACTER : piece.text,
      isEnd: false,
      guesses: nodes.filter(isGuess),
      node: nodes[ownIndex] ?? null,
      nBefore: Math.min(place, accepted.length),
      reason,
    };
  });
}

/** Return the models and the settings of an answer; undefined if its events do not tell. */
export function promptOf(events) {
  return events.find(({ event }) => event === "prompt");
}

/** Return the body of the request; undefined if the events do not have it. */
export function requestOf(events) {
  return events.find(({ event }) => event === "request");
}
