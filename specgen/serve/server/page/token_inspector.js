import { positionsOf, promptOf } from "./answer_positions.js";
import { messageOf } from "./notice.js";
import { percentText, reasonOf, targetSentence } from "./token_reasons.js";
import { ScoreError, TokenScores } from "./token_scores.js";
import { shownText, visibleText } from "./token_text.js";

const NOT_COMPLETE = "The probabilities can be computed when the answer is complete.";
const COMPUTING = "Computing the probabilities: both models read the answer once…";
const PROBABILITIES =
  "Probabilities are those at temperature 1, before samplers and grammar.";
const NGRAMS = "N-grams have no probabilities: earlier text went on like this.";
const NO_DRAFT = "There is no draft model.";
const NOT_COMPUTED = "This draft's probabilities cannot be computed afterwards.";
const WITHIN = "None of the draft model's own tokens begins here.";

/**
 * The panel that shows why a token of an answer is there.
 *
 * A click on a token opens it, and so does a button below each answer. From there, the arrow keys
 * lead to the tokens before and after it.
 */
export class TokenInspector {
  #scores;
  #turnWith;
  #panel = document.getElementById("inspector");
  #turn = null;
  // What happened at each position of the turn's answer.
  #positions = [];
  #temperature = 0;
  #number = 0;

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

  /** Show the first token of an answer at which a guess was rejected, else the first token. */
  async open(turn) {
    await this.#load(turn);
    const firstCorrected = this.#positions.findIndex(({ piece }) => piece.kind === "corrected");
    this.#show(Math.max(0, firstCorrected));
  }

  async #click(element) {
    const token = element.closest("[data-token]");
    const isOther = element.closest("a, button") !== null || !getSelection().isCollapsed;
    const isMarked = document.body.classList.contains("colours");
    if (token === null || isOther || !isMarked) {
      return;
    }
    const turn = this.#turnWith(token);
    if (!turn.hasEvents) {
      return;
    }
    await this.#load(turn);
    this.#show(committedBefore(turn.tokens, Number(token.dataset.token)));
  }

  #listenToPanel() {
    this.#button("previous").addEventListener("click", () => this.#show(this.#number - 1));
    this.#button("next").addEventListener("click", () => this.#show(this.#number + 1));
    this.#button("close").addEventListener("click", () => this.#panel.hidePopover());
    this.#panel.addEventListener("keydown", ({ key }) => {
      if (key === "ArrowLeft") {
        this.#show(this.#number - 1);
      } else if (key === "ArrowRight") {
        this.#show(this.#number + 1);
      }
    });
    this.#panel.addEventListener("toggle", ({ newState }) => {
      if (newState === "closed") {
        this.#mark(null);
      }
    });
    // The key closes the panel, and does not stop an answer as well.
    const stopEscape = (event) => {
      if (event.key === "Escape" && this.#panel.matches(":popover-open")) {
        event.stopPropagation();
      }
    };
    document.addEventListener("keydown", stopEscape, { capture: true });
  }

  async #load(turn) {
    const events = await turn.events();
    this.#turn = turn;
    this.#positions = positionsOf(events);
    this.#temperature = promptOf(events)?.sampler.temperature ?? 0;
  }

  #show(number) {
    const position = this.#positions[number];
    if (position === undefined) {
      return; // before the first token, or after the last one
    }
    this.#number = number;
    const { kind, text } = position.piece;
    const title = this.#part("title");
    title.replaceChildren(
      `Token ${number + 1} of ${this.#positions.length}: `,
      textElement("code", visibleText(text)),
      " ",
      textElement("span", kind, kind),
    );
    this.#part("why").textContent = reasonOf(position, this.#temperature);
    this.#button("previous").disabled = number === 0;
    this.#button("next").disabled = number === this.#positions.length - 1;
    this.#clearScores("");
    if (!this.#panel.matches(":popover-open")) {
      this.#panel.showPopover();
      this.#panel.focus();
    }
    this.#mark(number);
    this.#showScores(number);
  }

  async #showScores(number) {
    const turn = this.#turn;
    if (turn.isRunning) {
      this.#clearScores(NOT_COMPLETE);
      return;
    }
    const isCurrent = () => turn === this.#turn && number === this.#number;
    if (!this.#scores.has(turn)) {
      this.#clearScores(COMPUTING);
    }
    try {
      const scores = await this.#scores.of(turn);
      if (isCurrent()) {
        this.#fillScores(scores, number);
      }
    } catch (error) {
      if (isCurrent()) {
        this.#clearScores(error instanceof ScoreError ? error.message : messageOf(error));
      }
    }
  }

  #clearScores(text) {
    this.#part("numbers").textContent = text;
    this.#part("likely").replaceChildren();
    this.#part("note").textContent = "";
  }

  #fillScores(scores, number) {
    const position = this.#positions[number];
    const score = scores.tokens[number];
    this.#part("numbers").textContent = targetSentence(position, score);
    const guessIds = position.guesses.map(({ token_id: id }) => id);
    const draftEntries = score.draft_top_logprobs;
    const draft = draftEntries === null
      ? textElement("p", whyNoDraft(scores), "note")
      : likelyTable("Draft model", draftEntries, score, guessIds);
    this.#part("likely").replaceChildren(
      likelyTable("Target model", score.top_logprobs, score, guessIds),
      draft,
    );
    this.#part("note").textContent = PROBABILITIES;
  }

  // Mark a token in the answer, and scroll to it if the panel hides it; null removes the mark.
  #mark(number) {
    document.querySelectorAll(".inspected").forEach((element) => {
      element.classList.remove("inspected");
    });
    if (number === null) {
      return;
    }
    const index = indexOfCommitted(this.#turn.tokens, number);
    const elements = this.#turn.element.querySelectorAll(`[data-token="${index}"]`);
    elements.forEach((element) => element.classList.add("inspected"));
    const bottom = elements[0]?.getBoundingClientRect().bottom ?? 0;
    if (bottom > this.#panel.getBoundingClientRect().top || bottom < 0) {
      elements[0].scrollIntoView({ block: "start" });
    }
  }

  #part(name) {
    return this.#panel.querySelector(`.${name}`);
  }

  #button(name) {
    return this.#panel.querySelector(`button.${name}`);
  }
}

// The number of committed tokens before the one with an index; rejected tokens are not counted.
function committedBefore(tokens, index) {
  return tokens.slice(0, index).filter(({ kind }) => kind !== "rejected").length;
}

// The index of a committed token among all tokens; -1 if there is none with this number.
function indexOfCommitted(tokens, number) {
  let nLeft = number;
  return tokens.findIndex(({ kind }) => {
    if (kind === "rejected") {
      return false;
    }
    nLeft -= 1;
    return nLeft < 0;
  });
}

function whyNoDraft({ draft, tokens }) {
  if (draft === "none") {
    return NO_DRAFT;
  }
  if (draft === "ngram") {
    return NGRAMS;
  }
  const hasSome = tokens.some(({ draft_top_logprobs: entries }) => entries !== null);
  return hasSome ? WITHIN : NOT_COMPUTED;
}

// A table of likely tokens. The answer's own token and the guesses are marked.
function likelyTable(title, entries, score, guessIds) {
  const table = document.createElement("table");
  table.append(textElement("caption", title));
  for (const entry of entries) {
    const probability = Math.exp(entry.logprob);
    const text = textElement("code", visibleText(entry.bytes.length === 0 ? "" : entry.token));
    const cell = document.createElement("td");
    cell.append(text);
    const row = document.createElement("tr");
    if (isSameToken(entry, score)) {
      row.className = "chosen";
      cell.append(textElement("span", " in the answer", "role"));
    } else if (guessIds.includes(entry.id)) {
      row.className = "guessed";
      cell.append(textElement("span", " guessed", "role"));
    }
    const number = textElement("td", percentText(probability));
    number.style.setProperty("--share", probability);
    row.append(cell, number);
    table.append(row);
  }
  return table;
}

// The draft model may have other tokens: the same bytes are the same token.
function isSameToken(entry, score) {
  return String(entry.bytes) === String(score.bytes);
}

function textElement(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}
