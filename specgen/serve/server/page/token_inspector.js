import { positionsOf, promptOf } from "./answer_positions.js";
import { likelyElements } from "./likely_tokens.js";
import { messageOf } from "./notice.js";
import { guessedOtherwise, likelihoodSentence, reasonOf } from "./token_reasons.js";
import { ScoreError, TokenScores } from "./token_scores.js";
import { visible } from "./token_text.js";

const NOT_COMPLETE = "The probabilities can be computed when the answer is complete.";
const COMPUTING = "Computing the probabilities, once for the whole answer…";
const PROBABILITIES = "Probabilities are those at temperature 1, before samplers and grammar.";
const READ_LESS =
  "The draft model's are those after the whole text; to save time, it had read less of it when " +
  "it guessed.";

/**
 * The panel that tells why a token is in an answer.
 *
 * A click on a token opens it, and so does a button below each answer. From there, the arrow keys
 * lead to the tokens before and after it.
 */
export class TokenInspector {
  #scores;
  #turnWith;
  #panel = document.getElementById("inspector");
  // The element that gets the focus back when the panel is closed.
  #opener = null;
  // The turn that is shown, what happened at the positions of its answer, and the shown position.
  #turn = null;
  #positions = [];
  #number = 0;
  #temperature = 0;

  /**
   * @param {import("./api_client.js").ApiClient} client
   * @param {HTMLElement} conversation - the element whose tokens can be clicked
   * @param {function(Element): import("./turn.js").Turn} turnWith - returns the turn that contains
   *   an element
   */
  constructor(client, conversation, turnWith) {
    this.#scores = new TokenScores(client);
    this.#turnWith = turnWith;
    conversation.addEventListener("click", ({ target }) => this.#click(target));
    this.#listenToPanel();
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  /** Show the first token of an answer that corrects a guess, else the first one. */
  async open(turn) {
    await this.#load(turn);
    const firstCorrected = this.#positions.findIndex(({ piece }) => piece.kind === "corrected");
    this.#show(Math.max(0, firstCorrected));
  }

  close() {
    const hadFocus = this.#panel.contains(document.activeElement);
    this.#setOpen(false);
    unmark();
    if (hadFocus) {
      this.#opener.focus();
    }
  }

  /** Show what could not be known before the answer of a turn had ended. */
  async endTurn(turn) {
    if (this.isOpen && turn === this.#turn) {
      await this.#load(turn);
      this.#showToken();
    }
  }

  /** Close the panel if the page no longer shows the turn that it is about. */
  closeWithoutTurn() {
    if (this.isOpen && !this.#turn.element.isConnected) {
      this.close();
    }
  }

  async #click(element) {
    const token = element.closest("[data-token]");
    const areTokensShown = document.body.classList.contains("colours");
    // Whoever selects a text or follows a link does not ask about a token.
    const isOther = element.closest("a, button") !== null || !getSelection().isCollapsed;
    if (token === null || !areTokensShown || isOther) {
      return;
    }
    const turn = this.#turnWith(token);
    if (turn.hasEvents) {
      await this.#load(turn);
      this.#show(nCommittedBefore(turn.tokens, Number(token.dataset.token)));
    }
  }

  // The style sheet makes room for the panel.
  #setOpen(isOpen) {
    this.#panel.hidden = !isOpen;
    document.body.classList.toggle("inspecting", isOpen);
  }

  #listenToPanel() {
    const panel = this.#panel;
    panel.querySelector(".previous").addEventListener("click", () => this.#step(-1));
    panel.querySelector(".next").addEventListener("click", () => this.#step(1));
    panel.querySelector(".close").addEventListener("click", () => this.close());
    panel.addEventListener("keydown", ({ key }) => {
      if (key === "ArrowLeft") {
        this.#step(-1);
      } else if (key === "ArrowRight") {
        this.#step(1);
      }
    });
  }

  async #load(turn) {
    const events = await turn.events();
    this.#turn = turn;
    this.#positions = positionsOf(events);
    this.#temperature = promptOf(events)?.sampler.temperature ?? 0;
  }

  #step(distance) {
    const number = this.#number + distance;
    if (number >= 0 && number < this.#positions.length) {
      this.#show(number);
    }
  }

  #show(number) {
    this.#number = number;
    if (!this.isOpen) {
      this.#opener = document.activeElement;
      this.#setOpen(true);
    }
    this.#showToken();
    this.#takeFocus();
  }

  #showToken() {
    this.#showReason();
    this.#mark();
    this.#showScores();
  }

  #takeFocus() {
    const focused = document.activeElement;
    // At the first and the last token, a button is disabled, and would take the focus with it.
    if (!this.#panel.contains(focused) || focused.disabled) {
      this.#panel.focus({ preventScroll: true });
    }
  }

  #showReason() {
    const position = this.#positions[this.#number];
    const text = document.createElement("code");
    text.textContent = visible(position.text);
    const kind = document.createElement("span");
    kind.textContent = position.piece.kind;
    kind.className = position.piece.kind;
    this.#part("title").replaceChildren(this.#placeText(), text, " ", kind);
    this.#part("why").textContent = reasonOf(position, this.#temperature);
    this.#part("previous").disabled = this.#number === 0;
    this.#part("next").disabled = this.#number === this.#positions.length - 1;
  }

  // Which token is shown. As in the statistics, the end-of-text token is not counted.
  #placeText() {
    if (this.#positions[this.#number].isEnd) {
      return "After the last token: ";
    }
    const nTokens = this.#positions.filter(({ isEnd }) => !isEnd).length;
    return `Token ${this.#number + 1} of ${nTokens}: `;
  }

  async #showScores() {
    const turn = this.#turn;
    const number = this.#number;
    if (turn.isRunning) {
      this.#showInsteadOfScores(NOT_COMPLETE);
      return;
    }
    if (!this.#scores.has(turn)) {
      this.#showInsteadOfScores(COMPUTING);
    }
    const isStillShown = () => turn === this.#turn && number === this.#number;
    try {
      const scores = await this.#scores.of(turn);
      if (isStillShown()) {
        this.#fillScores(scores);
      }
    } catch (error) {
      if (isStillShown()) {
        const text = error instanceof ScoreError ? error.message : messageOf(error);
        this.#showInsteadOfScores(text);
      }
    }
  }

  #fillScores(scores) {
    const position = this.#positions[this.#number];
    const score = scores.tokens[this.#number];
    this.#part("numbers").textContent = likelihoodSentence(position, score);
    this.#part("likely").replaceChildren(...likelyElements(scores, this.#number, position.guesses));
    const hasReadLess = guessedOtherwise(position, score);
    this.#part("footnote").textContent = hasReadLess ? `${PROBABILITIES} ${READ_LESS}` : PROBABILITIES;
  }

  #showInsteadOfScores(text) {
    this.#part("numbers").textContent = text;
    this.#part("likely").replaceChildren();
    this.#part("footnote").textContent = "";
  }

  // Mark the token in the answer, and scroll to it if it is out of view.
  #mark() {
    unmark();
    const index = indexOfCommitted(this.#turn.tokens, this.#number);
    const elements = this.#turn.element.querySelectorAll(`[data-token="${index}"]`);
    elements.forEach((element) => element.classList.add("inspected"));
    elements[0]?.scrollIntoView({ block: "nearest" });
  }

  #part(name) {
    return this.#panel.querySelector(`.${name}`);
  }
}

function unmark() {
  document.querySelectorAll(".inspected").forEach(({ classList }) => classList.remove("inspected"));
}

// The number of committed tokens before the token with an index.
function nCommittedBefore(tokens, index) {
  return tokens.slice(0, index).filter(isCommitted).length;
}

// The index of a committed token among all tokens.
function indexOfCommitted(tokens, number) {
  return tokens.indexOf(tokens.filter(isCommitted)[number]);
}

function isCommitted({ kind }) {
  return kind !== "rejected";
}
