// A conversation as a file: in Markdown to be read, or in JSON to be imported again.

import { titleOf } from "./conversation_title.js";
import { download } from "./download.js";
import { newId } from "./identifiers.js";
import { questionWithFiles } from "./question_files.js";

const FORMAT = "specgen conversation";
// The beginning of a file's name, without its ending: up to 40 characters, and not half of one.
const NAME_BEGINNING = /^.{0,40}/u;

/** @param {import("./conversation_store.js").SavedConversation} conversation */
export function downloadMarkdown(conversation) {
  download(asMarkdown(conversation), `${fileNameOf(conversation)}.md`, "text/markdown");
}

/** @param {import("./conversation_store.js").SavedConversation} conversation */
export function downloadJson(conversation) {
  const text = JSON.stringify(asObject(conversation), null, 2);
  download(text, `${fileNameOf(conversation)}.json`, "application/json");
}

/**
 * Return the conversation in the text of a JSON file; null if it has none.
 *
 * @returns {import("./conversation_store.js").SavedConversation|null} with a new id
 */
export function importedConversation(text) {
  try {
    return fromObject(JSON.parse(text));
  } catch {
    return null;
  }
}

function asMarkdown(conversation) {
  const time = new Date(conversation.createdMs).toLocaleString();
  const turns = conversation.turns.map(turnAsMarkdown);
  return [`# ${titleOf(conversation)}`, `*${time}*`, ...turns].join("\n\n") + "\n";
}

function turnAsMarkdown({ question, attachments, text, error }) {
  const asked = questionWithFiles(question, attachments);
  const parts = ["## Question", asked, "## Answer", text.trim()];
  if (error !== "") {
    parts.push(`*${error}*`);
  }
  return parts.filter((part) => part !== "").join("\n\n");
}

// The conversation with names that others can read.
function asObject({ title, createdMs, changedMs, turns }) {
  return {
    format: FORMAT,
    title,
    created: new Date(createdMs).toISOString(),
    changed: new Date(changedMs).toISOString(),
    turns: turns.map((turn) => ({
      question: turn.question,
      files: turn.attachments,
      thought: turn.thought,
      answer: turn.text,
      tokens: turn.pieces,
      statistics: turn.figures,
      passes: turn.passes,
      error: turn.error,
    })),
  };
}

// The reverse. Whoever wrote the file may have left out what is not a question or an answer.
function fromObject({ format, title = null, created, changed, turns }) {
  if (format !== FORMAT || (title !== null && typeof title !== "string")) {
    return null;
  }
  return {
    id: newId(),
    title,
    createdMs: timeOf(created),
    changedMs: timeOf(changed),
    revision: 0,
    leftOut: null,
    turns: turns.map((turn) => ({
      id: newId(),
      question: textIn(turn.question),
      attachments: (turn.files ?? []).map(({ name, text }) => ({
        name: textIn(name),
        text: textIn(text),
      })),
      text: textIn(turn.answer),
      thought: textIn(turn.thought ?? ""),
      pieces: (turn.tokens ?? []).map(([text, ...others]) => [textIn(text), ...others]),
      figures: textIn(turn.statistics ?? ""),
      passes: (turn.passes ?? []).map(Number),
      error: textIn(turn.error ?? ""),
      hasEvents: false,
    })),
  };
}

function textIn(value) {
  if (typeof value !== "string") {
    throw new TypeError(`${value} is not a text`);
  }
  return value;
}

function timeOf(text) {
  const timeMs = Date.parse(text);
  return Number.isNaN(timeMs) ? Date.now() : timeMs;
}

function fileNameOf(conversation) {
  const words = titleOf(conversation).toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const [start] = NAME_BEGINNING.exec(words.join("-"));
  return start.replace(/-$/, "") || "conversation";
}
