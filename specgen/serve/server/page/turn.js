// A question and its answer, as the page shows them.

import { Figures } from "./figures.js";
import { showMarkdown } from "./markdown.js";
import { markTokens, piecesOf } from "./marks.js";

const MOST_TOKENS = "cut off at the most tokens allowed";
const STOPPED = "stopped";
// Markdown is shown anew after this time, and later if that takes long.
const PAUSE_MS = 50;
const PAUSES_PER_DRAWING = 4;

// A message of a conversation as the server's API has it.
export function said(role, content) {
  return { role, content };
}

export class Turn {
  #answer;
  #figures = new Figures(performance.now());
  #pieces = [];
  #events = []; // all of them, as long as the page is open
  #isCut = false; // whether the answer ended before its end
  #isRunning = true;
  #following;
  #timer = null;
  #drawMs = 0;

  // `following(change)` makes a change that may make the turn longer.
  constructor(question, following) {
    this.question = question;
    this.text = this.thought = "";
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#following = following;
    this.#answer = this.#part("answer");
    this.#part("question").textContent = question;
    this.#show(this.#figures.running());
  }

  // A turn from what `saved` returned.
  static restored({ question, text, thought, pieces, figures, error }, following) {
    const turn = new Turn(question, following);
    turn.#isRunning = false;
    turn.#pieces = pieces.map(([text, kind, origin]) => ({ text, kind, origin }));
    turn.text = text;
    turn.thought = thought;
    turn.draw();
    turn.#show(figures);
    turn.#showError(error);
    return turn;
  }

  saved() {
    return {
      question: this.question,
      text: this.text,
      thought: this.thought,
      pieces: this.#pieces.map(({ text, kind, origin }) => [text, kind, origin]),
      figures: this.#isRunning ? joined(this.#figures.final(), STOPPED) : this.#part("figures").textContent,
      error: this.#part("error").textContent,
    };
  }

  // What a click on "Try again" and on "Edit question" does.
  set onretry(listener) {
    this.#part("retry").addEventListener("click", listener);
  }

  set onedit(listener) {
    this.#part("edit").addEventListener("click", listener);
  }

  set onreplay(listener) {
    this.#part("replay").addEventListener("click", listener);
  }

  // The messages of a conversation for the server. A question without an answer is none of them:
  // templates want user and assistant in turn.
  messages() {
    if (this.text === "") {
      return [];
    }
    return [said("user", this.question), said("assistant", this.text)];
  }

  add(chunk) {
    const choice = chunk.choices?.[0];
    const content = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    const pieces = piecesOf(chunk.events ?? []);
    this.#figures.count(chunk, pieces, performance.now());
    this.#events.push(...(chunk.events ?? []));
    this.#pieces.push(...pieces);
    this.text += content;
    this.thought += thought;
    const pause = Math.max(PAUSE_MS, PAUSES_PER_DRAWING * this.#drawMs);
    this.#timer ??= setTimeout(() => this.#following(() => this.draw()), pause);
    this.#isCut ||= choice?.finish_reason === "length";
    this.#show(this.#figures.running());
  }

  draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const started = performance.now();
    this.#part("thought").textContent = this.thought.trim();
    showMarkdown(this.#answer, this.text, (root) => markTokens(root, this.text, this.#pieces));
    this.#drawMs = performance.now() - started;
  }

  // A file in which the answer grows as it did. `page` is its template.
  replay(page) {
    const events = JSON.stringify(this.#events).replaceAll("<", "\\u003c");
    return new Blob([page.replace("DATA_HERE", () => events)], { type: "text/html" });
  }

  // `nContext` is the most tokens of a prompt and its answer, null if it is not known.
  end(nContext) {
    const isFull = this.#isCut && nContext !== null && this.#figures.nTotal > nContext;
    this.#end(isFull ? contextFull(nContext) : this.#isCut && MOST_TOKENS);
  }

  stop() {
    this.#end(STOPPED);
  }

  // What there is of the answer stays; the error is one line.
  fail(message) {
    this.#showError(message);
    this.#end();
  }

  #end(how) {
    this.#isRunning = false;
    this.draw();
    this.#part("rounds").replaceChildren(...bars(this.#figures.rounds));
    this.#part("replay").hidden = !this.#events.some(({ event }) => event === "committed");
    this.#show(this.#figures.final(), how);
  }

  #showError(message) {
    this.#part("error").textContent = message;
    this.#part("error").hidden = message === "";
  }

  #show(...parts) {
    this.#part("figures").textContent = joined(...parts);
  }

  #part(name) {
    return this.element.querySelector(`.${name}`);
  }
}

function contextFull(nContext) {
  return `cut off, since the context of ${nContext} tokens is full: begin a new conversation, or start ` +
    `the server with a larger context (-c ${2 * nContext})`;
}

// A bar for each number of tokens, as high as the share of the passes that added so many.
function bars(nRounds) {
  return nRounds.map((n, index) => {
    const bar = document.createElement("span");
    bar.textContent = index + 1;
    bar.title = `${n} of the passes added ${index + 1}`;
    bar.style.setProperty("--share", n / Math.max(...nRounds));
    return bar;
  });
}

function joined(...parts) {
  return parts.filter((part) => part).join(" · ");
}
