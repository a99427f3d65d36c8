import { ServerError } from "./api_client.js";

const CONTEXT_HINT =
  "shorten the question, start a new conversation, or start the server with a larger context (-c)";

export const NOT_STORED =
  "This browser does not store conversations, because its storage is full or blocked: they are " +
  "lost when you close the page.";

/** Show a text above the question; an empty one removes it. */
export function showNotice(text) {
  const notice = document.getElementById("notice");
  notice.textContent = text;
  notice.hidden = text === "";
}

/** Return what the user reads about an error, in one line. */
export function messageOf(error) {
  if (!(error instanceof ServerError)) {
    console.error(error);
    return "The server sent something that this page does not understand.";
  }
  const text = error.message.replace(/\s+/g, " ");
  return error.isContextTooSmall ? `${text}: ${CONTEXT_HINT}` : text;
}
