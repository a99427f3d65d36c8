// The files that belong to a question.

/**
 * A text file that was given to the model with a question.
 *
 * @typedef {object} Attachment
 * @property {string} name
 * @property {string} text
 */

/**
 * Return what the model is asked: the files, as `specgen chat --file` gives them, and the question.
 *
 * @param {string} question
 * @param {Attachment[]} attachments
 */
export function questionWithFiles(question, attachments) {
  const files = attachments.map(({ name, text }) => `${name}:\n\n${text.trimEnd()}\n\n`);
  return files.join("") + question;
}

/** Show the names of the files in a list, which is hidden if there are none. */
export function showAttachments(list, attachments) {
  const items = attachments.map(({ name }) => {
    const item = document.createElement("li");
    item.textContent = name;
    return item;
  });
  list.replaceChildren(...items);
  list.hidden = attachments.length === 0;
}
