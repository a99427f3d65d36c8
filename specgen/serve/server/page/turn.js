import { AnswerStats } from "./answer_stats.js";
import { counted, joined } from "./format.js";
import { markTokens } from "./token_marks.js";
import { showMarkdown } from "./markdown.js";
import { downloadReplay } from "./replay_download.js";
import { tokensOf } from "./tokens.js";

const TOKEN_LIMIT_REACHED = "cut off at the maximum number of tokens";
const STOPPED = "stopped";
// The minimum pause between two drawings of an answer that is arriving.
const MIN_PAUSE_MS = 50;
// The minimum pause as a multiple of the time that the last drawing took.
const PAUSE_PER_DRAWING = 4;

/**
 * A turn as the browser stores it.
 *
 * @typedef {object} SavedTurn
 * @property {string} question
 * @property {string} text - the answer, in Markdown
 * @property {string} thought - what the model wrote before its answer
 * @property {[string, string, string?][]} pieces - text, kind and origin of each token
 * @property {string} figures - the line of statistics
 * @property {string} error - empty if there was none
 */

/** Return a message of a conversation in the form of the server's API. */
export function message(role, content) {
  return { role, content };
}

/** A question and its answer, as the page shows them. */
export class Turn {
  #keepEndInView;
  #stats = new AnswerStats(performance.now());
  // All tokens of the thought and the answer, including rejected ones.
  #tokens = [];
  // All events of the answer. A turn that was stored has none.
  #events = [];
  // Whether a limit ended the answer.
  #isCutOff = false;
  #isRunning = true;
  // The timer of the next drawing; null if none is planned.
  #drawTimer = null;
  // The time that the last drawing took.
  #drawMs = 0;

  /**
   * @param {string} question
   * @param {function(function(): void): void} keepEndInView - makes a change to the turn, and
   *   keeps the end of the conversation in view
   */
  constructor(question, keepEndInView) {
    this.question = question;
    this.text = "";
    this.thought = "";
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#keepEndInView = keepEndInView;
    this.#part("question").textContent = question;
    this.#showStats(this.#stats.running());
  }

  /**
   * Return a turn from what `saved` returned.
   *
   * @param {SavedTurn} saved
   */
  static restored(saved, keepEndInView) {
    const turn = new Turn(saved.question, keepEndInView);
    turn.#isRunning = false;
    turn.#tokens = saved.pieces.map(([text, kind, origin]) => ({ text, kind, origin }));
    turn.text = saved.text;
    turn.thought = saved.thought;
    turn.#draw();
    turn.#showStats(saved.figures);
    turn.#showError(saved.error);
    return turn;
  }

  /**
   * Return what the browser stores. An answer that is still arriving is stored as stopped.
   *
   * @returns {SavedTurn}
   */
  saved() {
    return {
      question: this.question,
      text: this.text,
      thought: this.thought,
      pieces: this.#tokens.map(({ text, kind, origin }) => [text, kind, origin]),
      figures: this.#savedStats(),
      error: this.#part("error").textContent,
    };
  }

  #savedStats() {
    if (this.#isRunning) {
      return joined(this.#stats.final(), STOPPED);
    }
    return this.#part("stats").textContent;
  }

  /** Call `listener` when one of the turn's buttons ("retry", "edit", "replay") is clicked. */
  onClick(button, listener) {
    this.#part(button).addEventListener("click", listener);
  }

  /**
   * Return the turn's messages for a request.
   *
   * A question without an answer is left out, because chat templates expect user and assistant to
   * alternate.
   */
  messages() {
    if (this.text === "") {
      return [];
    }
    return [message("user", this.question), message("assistant", this.text)];
  }

  /** Add a chunk of the server's answer. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    const events = chunk.events ?? [];
    const tokens = tokensOf(events);
    this.text += choice?.delta?.content ?? "";
    this.thought += choice?.delta?.reasoning_content ?? "";
    this.#events.push(...events);
    this.#tokens.push(...tokens);
    this.#isCutOff ||= choice?.finish_reason === "length";
    this.#stats.add(chunk, tokens, performance.now());
    this.#showStats(this.#stats.running());
    this.#drawSoon();
  }

  /**
   * Show that the answer is complete, or that a limit cut it off.
   *
   * @param {number|null} nContext - the size of the context in tokens, if it is known
   */
  end(nContext) {
    if (!this.#isCutOff) {
      this.#finish("");
    } else if (nContext !== null && this.#stats.nContextTokens > nContext) {
      this.#finish(contextFull(nContext));
    } else {
      this.#finish(TOKEN_LIMIT_REACHED);
    }
  }

  /** Show that the user stopped the answer. */
  stop() {
    this.#finish(STOPPED);
  }

  /** Show an error, in one line below what has arrived of the answer. */
  fail(errorMessage) {
    this.#showError(errorMessage);
    this.#finish("");
  }

  /** Save a file in which the answer grows as it did; `template` is the page without data. */
  downloadReplay(template) {
    downloadReplay(template, this.#events);
  }

  #finish(ending) {
    this.#isRunning = false;
    this.#draw();
    this.#part("passes").replaceChildren(...passBars(this.#stats.passesByTokens));
    this.#part("replay").hidden = !this.#events.some(({ event }) => event === "committed");
    this.#showStats(joined(this.#stats.final(), ending));
  }

  #drawSoon() {
    const pauseMs = Math.max(MIN_PAUSE_MS, PAUSE_PER_DRAWING * this.#drawMs);
    this.#drawTimer ??= setTimeout(() => this.#keepEndInView(() => this.#draw()), pauseMs);
  }

  #draw() {
    clearTimeout(this.#drawTimer);
    this.#drawTimer = null;
    const startMs = performance.now();
    this.#part("thought").textContent = this.thought.trim();
    showMarkdown(this.#part("answer"), this.text, (rendered) =>
      markTokens(rendered, this.text, this.#tokens),
    );
    this.#drawMs = performance.now() - startMs;
  }

  #showStats(text) {
    this.#part("stats").textContent = text;
  }

  #showError(text) {
    this.#part("error").textContent = text;
    this.#part("error").hidden = text === "";
  }

  #part(name) {
    return this.element.querySelector(`.${name}`);
  }
}

function contextFull(nContext) {
  return (
    `cut off because the context of ${nContext} tokens is full: start a new conversation, ` +
    `or start the server with a larger context (-c ${2 * nContext})`
  );
}

// A bar for each number of tokens, as high as the number of target passes that added so many.
function passBars(passesByTokens) {
  const maxPasses = Math.max(...passesByTokens);
  return passesByTokens.map((nPasses, index) => {
    const nTokens = index + 1;
    const bar = document.createElement("span");
    bar.textContent = nTokens;
    bar.title = `${nPasses} of the target passes added ${counted(nTokens, "token")}`;
    bar.style.setProperty("--share", nPasses / maxPasses);
    return bar;
  });
}
