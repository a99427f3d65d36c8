// Where files come from: a button, the clipboard, or files that are dropped anywhere on the page.

const input = document.getElementById("file-input");

/**
 * Call `listener` with the files that the user gives.
 *
 * @param {function(File[]): void} listener
 */
export function listenForFiles(listener) {
  document.getElementById("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    listener([...input.files]);
    input.value = ""; // so that the same file can be chosen again
  });
  const question = document.getElementById("question");
  question.addEventListener("paste", (event) => takePasted(event, listener));
  // Without this, the browser would leave the page and show the file.
  addEventListener("dragover", (event) => allowDrop(event));
  addEventListener("dragleave", ({ relatedTarget }) => {
    if (relatedTarget === null) {
      showDropping(false);
    }
  });
  addEventListener("drop", (event) => takeDropped(event, listener));
}

// With a text, some programs also copy a picture of it. Then the text is meant.
function takePasted(event, listener) {
  const { files, types } = event.clipboardData;
  if (files.length > 0 && !types.includes("text/plain")) {
    event.preventDefault();
    listener([...files]);
  }
}

function allowDrop(event) {
  if (hasFiles(event)) {
    event.preventDefault();
    showDropping(true);
  }
}

function takeDropped(event, listener) {
  showDropping(false);
  if (hasFiles(event)) {
    event.preventDefault();
    listener([...event.dataTransfer.files]);
  }
}

// A text that is dragged is left to the browser.
function hasFiles({ dataTransfer }) {
  return dataTransfer.types.includes("Files");
}

function showDropping(isDropping) {
  document.body.classList.toggle("dropping", isDropping);
}
