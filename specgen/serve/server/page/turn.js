import { AnswerStats } from "./answer_stats.js";
import { counted, joined } from "./format.js";
import { markTokens } from "./token_marks.js";
import { showMarkdown } from "./markdown.js";
import { questionWithFiles, showAttachments } from "./question_files.js";
import { tokensOf } from "./tokens.js";

const TOKEN_LIMIT_REACHED = "cut off at the maximum number of tokens";
const STOPPED = "stopped";
// How an answer ends that was stored while it was arriving. Another tab may show more of it.
const UNFINISHED = "unfinished";
// The minimum pause between two drawings of an answer that is arriving.
const MIN_PAUSE_MS = 50;
// The minimum pause as a multiple of the time that the last drawing took.
const PAUSE_PER_DRAWING = 4;

/**
 * A turn as the browser stores it.
 *
 * @typedef {object} SavedTurn
 * @property {string} id - tells the turns of a conversation apart
 * @property {string} question
 * @property {import("./question_files.js").Attachment[]} attachments
 * @property {string} text - the answer, in Markdown
 * @property {string} thought - what the model wrote before its answer
 * @property {[string, string, string?, number?][]} pieces - text, kind, origin and logprob of each
 *   token
 * @property {string} figures - the line of statistics
 * @property {number[]} passes - the numbers of target passes that added one, two, ... tokens
 * @property {string} error - empty if there was none
 * @property {boolean} hasEvents - whether the events of the answer are stored
 */

/** Return a message of a conversation in the form of the server's API. */
export function message(role, content) {
  return { role, content };
}

/** A question and its answer, as the page shows them. */
export class Turn {
  #keepEndInView;
  #loadEvents;
  #stats = new AnswerStats(performance.now());
  // All tokens of the thought and the answer, including rejected ones.
  #tokens = [];
  // All events of the answer; null if they are stored and were not loaded yet.
  #events = [];
  // The heights of the bars below the statistics, as in a SavedTurn.
  #passes = [];
  // Whether a limit ended the answer.
  #isCutOff = false;
  #isRunning = true;
  // The timer of the next drawing; null if none is planned.
  #drawTimer = null;
  // The time that the last drawing took.
  #drawMs = 0;

  /**
   * @param {{id: string, question: string, attachments: object[]}} asked
   * @param {function(function(): void): void} keepEndInView - makes a change to the turn, and
   *   keeps the end of the conversation in view
   */
  constructor({ id, question, attachments }, keepEndInView) {
    this.id = id;
    this.question = question;
    this.attachments = attachments;
    this.text = "";
    this.thought = "";
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#keepEndInView = keepEndInView;
    this.#part("question").textContent = question;
    showAttachments(this.#part("attachments"), attachments);
    this.#showStats(this.#stats.running());
    this.#showState();
  }

  /**
   * Return a turn from what `saved` returned.
   *
   * @param {SavedTurn} saved
   * @param {function(): Promise<object[]>} loadEvents - gets the events of the answer
   */
  static restored(saved, keepEndInView, loadEvents) {
    const turn = new Turn(saved, keepEndInView);
    turn.#isRunning = false;
    turn.#loadEvents = loadEvents;
    turn.#events = saved.hasEvents ? null : [];
    turn.#tokens = saved.pieces.map(([text, kind, origin, logprob]) => ({
      text,
      kind,
      origin,
      logprob,
    }));
    turn.text = saved.text;
    turn.thought = saved.thought;
    turn.#draw();
    turn.#showPasses(saved.passes);
    turn.#showStats(saved.figures);
    turn.#showError(saved.error);
    turn.#showState();
    return turn;
  }

  /**
   * Return what the browser stores. An answer that is still arriving is stored as unfinished.
   *
   * @returns {SavedTurn}
   */
  saved() {
    return {
      id: this.id,
      question: this.question,
      attachments: this.attachments,
      text: this.text,
      thought: this.thought,
      pieces: this.#tokens.map(({ text, kind, origin, logprob }) => [text, kind, origin, logprob]),
      figures: this.#savedStats(),
      passes: this.#passes,
      error: this.#error,
      hasEvents: this.hasEvents && !this.#isRunning,
    };
  }

  #savedStats() {
    if (this.#isRunning) {
      return joined(this.#stats.final(), UNFINISHED);
    }
    return this.#part("stats").textContent;
  }

  /** Whether the answer is still arriving. */
  get isRunning() {
    return this.#isRunning;
  }

  /** All tokens of the thought and the answer, including rejected ones. */
  get tokens() {
    return this.#tokens;
  }

  /** Whether the events of the answer are known, so that it can be replayed. */
  get hasEvents() {
    return this.#events === null || this.#events.some(({ event }) => event === "committed");
  }

  /** Return all events of the answer, in their order. */
  async events() {
    this.#events ??= await this.#loadEvents();
    return this.#events;
  }

  /** The element that shows the question. */
  get questionElement() {
    return this.#part("question");
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
    return [this.questionMessage(), message("assistant", this.text)];
  }

  /** Return the message that asks the question. */
  questionMessage() {
    return message("user", questionWithFiles(this.question, this.attachments));
  }

  /** Note the request, by which the server can score the answer afterwards. */
  begin({ model, messages }) {
    this.#events.push({ event: "request", model, messages });
  }

  /** Add a chunk of the server's answer. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    const events = chunk.events ?? [];
    this.text += choice?.delta?.content ?? "";
    this.thought += choice?.delta?.reasoning_content ?? "";
    this.#events.push(...events);
    this.#tokens.push(...tokensOf(events));
    this.#isCutOff ||= choice?.finish_reason === "length";
    this.#stats.add(chunk, performance.now());
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

  #finish(ending) {
    this.#isRunning = false;
    this.#draw();
    this.#showPasses(this.#stats.passesByTokens);
    this.#showStats(joined(this.#stats.final(), ending));
    this.#showState();
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

  #showPasses(passes) {
    this.#passes = passes;
    this.#part("passes").replaceChildren(...passBars(passes));
  }

  #showStats(text) {
    this.#part("stats").textContent = text;
  }

  get #error() {
    return this.#part("error").textContent;
  }

  #showError(text) {
    this.#part("error").textContent = text;
    this.#part("error").hidden = text === "";
  }

  // Offer what can be done with the turn as it is.
  #showState() {
    const hasAnswer = this.text !== "" && this.#error === "";
    this.element.classList.toggle("arriving", this.#isRunning);
    this.#button("copy").hidden = !hasAnswer;
    this.#button("retry").textContent = hasAnswer ? "Regenerate" : "Try again";
    this.#button("replay").hidden = !this.hasEvents;
    this.#button("inspect").hidden = !this.hasEvents;
  }

  // A part of the turn itself: elements of the answer may have the same class.
  #part(name) {
    return this.element.querySelector(`:scope > .${name}`);
  }

  #button(name) {
    return this.#part("actions").querySelector(`.${name}`);
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
