// Which turns fit into the context. (specgen/session/prompts/context_window.py has the same shares,
// but does not know what was left out of earlier prompts.)

// The share of the context that is reserved for an answer, unless answers are limited to less.
const ANSWER_SHARE = 1 / 4;
// If turns have to be left out, the remaining prompt takes at most this share of the context.
const REMAINING_SHARE = 1 / 2;

/**
 * Return how many of the oldest turns have to be left out of the next prompt.
 *
 * If any have to, more are left out than necessary. Each time it happens, the remaining turns have
 * to be prefilled again, so it should happen rarely.
 *
 * @param {object} conversation
 * @param {number} conversation.nTurns - the turns before the question
 * @param {number} conversation.nLeftOut - those that were left out of the last prompt
 * @param {number} nContext - the size of the context in tokens
 * @param {number|null} maxTokens - the maximum length of the answer; null for no limit
 * @param {function(number): Promise<number>} countTokens - counts the tokens of the prompt without
 *   the oldest turns; its argument is their number
 */
export async function turnsToLeaveOut(
  { nTurns, nLeftOut },
  nContext,
  maxTokens,
  countTokens,
) {
  const nReserved = Math.min(Math.floor(nContext * ANSWER_SHARE), maxTokens ?? nContext);
  if (nLeftOut >= nTurns || (await countTokens(nLeftOut)) <= nContext - nReserved) {
    return nLeftOut;
  }
  // The fewest turns that bring the prompt down to the goal, by bisection; at most all of them.
  const nGoal = Math.floor(nContext * REMAINING_SHARE);
  let low = nLeftOut + 1;
  let high = nTurns;
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if ((await countTokens(middle)) <= nGoal) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
