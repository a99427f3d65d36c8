// A question and its answer, as the page shows them.

import { Figures } from "./figures.js";
import { tokenElement } from "./marks.js";

const ENDS = { length: "cut off at the most tokens allowed" };

// A message of a conversation as the server's API has it.
export function said(role, content) {
  return { role, content };
}

export class Turn {
  #answer;
  #figures = new Figures(performance.now());
  #end = "";

  constructor(question) {
    this.question = question;
    this.text = "";
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#answer = this.#part("answer");
    this.#part("question").textContent = question;
    this.#show(this.#figures.running());
  }

  // What a click on "Try again" and on "Edit question" does.
  set onretry(listener) {
    this.#part("retry").addEventListener("click", listener);
  }

  set onedit(listener) {
    this.#part("edit").addEventListener("click", listener);
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
    const plain = content === "" ? [] : [{ text: content, kind: "plain" }];
    const pieces = chunk.pieces ?? plain;
    this.#figures.count(chunk, pieces, performance.now());
    this.#answer.append(...pieces.filter((piece) => piece.text).map(tokenElement));
    this.text += pieces.map((piece) => piece.text).join("");
    this.#end = ENDS[choice?.finish_reason] ?? this.#end;
    this.#show(this.#figures.running());
  }

  end() {
    this.#show(this.#figures.final(), this.#end);
  }

  stop() {
    this.#show(this.#figures.final(), "stopped");
  }

  // What there is of the answer stays; the error is one line.
  fail(message) {
    const error = this.#part("error");
    error.textContent = message;
    error.hidden = false;
    this.#show(this.#figures.final());
  }

  #show(...parts) {
    this.#part("figures").textContent = parts.filter((part) => part).join(" · ");
  }

  #part(name) {
    return this.element.querySelector(`.${name}`);
  }
}
