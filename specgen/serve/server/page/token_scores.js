// How likely the tokens of answers were to both models. The server computes it once per answer.

import { positionsOf, promptOf, requestOf } from "./answer_positions.js";

// The number of likeliest tokens that are shown.
const N_LIKELIEST = 5;

/** An answer that cannot be scored. Its message is a sentence for the user. */
export class ScoreError extends Error {}

export class TokenScores {
  #client;
  // Promises of the scores, by turn.
  #scores = new WeakMap();

  /** @param {import("./api_client.js").ApiClient} client */
  constructor(client) {
    this.#client = client;
  }

  /** Whether the scores of a turn were asked for. */
  has(turn) {
    return this.#scores.has(turn);
  }

  /**
   * Return the server's scores of a turn.
   *
   * Throws a ScoreError if the turn cannot be scored, or what the client throws.
   */
  of(turn) {
    if (!this.#scores.has(turn)) {
      const scores = this.#ask(turn);
      this.#scores.set(turn, scores);
      scores.catch(() => this.#scores.delete(turn)); // the next click asks again
    }
    return this.#scores.get(turn);
  }

  async #ask(turn) {
    const events = await turn.events();
    const request = requestOf(events);
    if (request === undefined) {
      throw new ScoreError("The prompt of this answer was not stored.");
    }
    const positions = positionsOf(events);
    const scores = await this.#client.tokenProbabilities({
      model: request.model,
      messages: request.messages,
      answer: positions.map(({ piece }) => piece.token_id),
      guesses: positions.flatMap(({ guesses }, position) =>
        guesses.map(({ token_id: token }) => ({ position, token })),
      ),
      top_logprobs: N_LIKELIEST,
    });
    const { target } = promptOf(events);
    if (scores.target !== target) {
      throw new ScoreError(`This answer is by ${target}, but the server has ${scores.target} now.`);
    }
    return scores;
  }
}
