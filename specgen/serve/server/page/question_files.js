// The files that belong to a question.

import { counted } from "./format.js";

/**
 * A text file that was given to the model with a question.
 *
 * @typedef {object} Attachment
 * @property {string} name
 * @property {string} text
 * @property {number} [nTokens] - the tokens that it adds to the question
 */

/**
 * Return what the model is asked: the files, each with its name and in a fence, and the question.
 *
 * @param {string} question
 * @param {Attachment[]} attachments
 */
export function questionWithFiles(question, attachments) {
  return [...attachments.map(fenced), question].join("\n\n");
}

/** Return a file as a part of a question. */
export function fenced({ name, text }) {
  const ticks = text.match(/`{3,}/g) ?? [];
  const nTicks = Math.max(2, ...ticks.map(({ length }) => length)) + 1;
  const fence = "`".repeat(nTicks);
  const ending = name.match(/\.(\w+)$/)?.[1] ?? "";
  return `File ${name}:\n${fence}${ending}\n${text.trimEnd()}\n${fence}`;
}

/** Return the name of a file with its size, if that is known. */
export function nameWithSize({ name, nTokens }) {
  return nTokens === undefined ? name : `${name} · ${tokenCount(nTokens)}`;
}

/** Return a number of tokens as text: "1,234 tokens". */
export function tokenCount(n) {
  return counted(n, "token").replace(String(n), n.toLocaleString("en"));
}

/** Show files in a list, which is hidden if there are none. Each unfolds to its text. */
export function showAttachments(list, attachments) {
  list.replaceChildren(...attachments.map(fileItem));
  list.hidden = attachments.length === 0;
}

function fileItem(attachment) {
  const summary = document.createElement("summary");
  summary.textContent = nameWithSize(attachment);
  const text = document.createElement("pre");
  text.textContent = attachment.text;
  text.tabIndex = 0; // so that it can be scrolled with the keyboard
  const details = document.createElement("details");
  details.append(summary, text);
  const item = document.createElement("li");
  item.append(details);
  return item;
}
