import { isSubmitKey } from "./keys.js";

/**
 * Let the user change a question in its place.
 *
 * @param {HTMLElement} element - shows the question
 * @param {string} question
 * @returns {Promise<string|null>} the new question; null if the user cancels
 */
export function editedQuestion(element, question) {
  const form = document.getElementById("question-editor").content.firstElementChild.cloneNode(true);
  const field = form.querySelector("textarea");
  field.value = question;
  element.replaceWith(form);
  field.focus();
  return new Promise((resolve) => {
    const end = (text) => {
      form.replaceWith(element);
      resolve(text);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end(field.value.trim());
    });
    form.querySelector(".cancel").addEventListener("click", () => end(null));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it would also stop an answer
        end(null);
      } else if (event.target === field && isSubmitKey(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
  });
}
