import { messageOf, showNotice } from "./notice.js";
import { fenced, nameWithSize, questionWithFiles, tokens } from "./question_files.js";
import { FileError, readTextFile } from "./text_file.js";

const COUNTING = "counting tokens…";

/**
 * The files that will be sent with the next question.
 *
 * They are chosen with a button, dropped anywhere on the page, or pasted into the question.
 */
export class ComposerFiles {
  #client;
  #modelMenu;
  #list = document.getElementById("files");
  #input = document.getElementById("file-input");
  /** @type {import("./question_files.js").Attachment[]} */
  #attachments = [];
  // Resolves when the tokens of all files are counted.
  #counting = Promise.resolve();

  /**
   * @param {import("./api_client.js").ApiClient} client
   * @param {import("./model_menu.js").ModelMenu} modelMenu
   */
  constructor(client, modelMenu) {
    this.#client = client;
    this.#modelMenu = modelMenu;
    this.#listen();
  }

  /** Remove the files from the composer, and return them. */
  take() {
    const taken = this.#attachments;
    this.#attachments = [];
    this.#show();
    return taken;
  }

  /** Add attachments of an earlier question, which is edited. */
  put(attachments) {
    this.#attachments.push(...attachments);
    this.#show();
  }

  /**
   * Whether a question fits into the context together with the files. If not, the user is told.
   *
   * @param {{role: string, content: string}[]} otherMessages - those that cannot be left out
   */
  async fits(question, otherMessages) {
    if (this.#attachments.length === 0) {
      return true;
    }
    await this.#counting;
    const content = questionWithFiles(question, this.#attachments);
    const messages = [...otherMessages, { role: "user", content }];
    try {
      const n = await this.#client.countPromptTokens(this.#modelMenu.model, messages);
      return this.#tellIfTooLong("The question with its files has", n);
    } catch (error) {
      showNotice(messageOf(error));
      return false;
    }
  }

  #listen() {
    const button = document.getElementById("attach");
    button.addEventListener("click", () => this.#input.click());
    this.#input.addEventListener("change", () => {
      this.#add([...this.#input.files]);
      this.#input.value = ""; // so that the same file can be chosen again
    });
    document.getElementById("question").addEventListener("paste", (event) => this.#paste(event));
    // Without this, the browser would leave the page and show the file.
    addEventListener("dragover", (event) => this.#dragOver(event));
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) {
        document.body.classList.remove("dropping");
      }
    });
    addEventListener("drop", (event) => this.#drop(event));
  }

  // Programs for texts put a picture of a text next to the text itself, which is meant.
  #paste(event) {
    const { files, types } = event.clipboardData;
    if (files.length > 0 && !types.includes("text/plain")) {
      event.preventDefault();
      this.#add([...files]);
    }
  }

  #dragOver(event) {
    if (event.dataTransfer.types.includes("Files")) {
      event.preventDefault();
      document.body.classList.add("dropping");
    }
  }

  #drop(event) {
    document.body.classList.remove("dropping");
    if (event.dataTransfer.types.includes("Files")) {
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    }
  }

  // Read files, show them, and count their tokens. What cannot be attached is named in one line.
  async #add(files) {
    showNotice("");
    const added = [];
    const problems = [];
    for (const file of files) {
      try {
        added.push({ name: file.name, text: await readTextFile(file) });
      } catch (error) {
        if (!(error instanceof FileError)) {
          throw error;
        }
        problems.push(error.message);
      }
    }
    this.#attachments.push(...added);
    this.#show();
    if (problems.length > 0) {
      showNotice(problems.join(" "));
    }
    if (added.length > 0) {
      this.#counting = this.#counting.then(() => this.#count(added));
      document.getElementById("question").focus();
    }
  }

  async #count(attachments) {
    try {
      for (const attachment of attachments) {
        const { model } = this.#modelMenu;
        attachment.nTokens = await this.#client.countTokens(model, fenced(attachment));
      }
      if (this.#modelMenu.isModelUnloaded) {
        await this.#modelMenu.describe(); // counting has loaded it, and the context is known now
      }
    } catch (error) {
      showNotice(messageOf(error));
      return;
    }
    this.#show();
    const nTokens = this.#attachments.reduce((sum, file) => sum + (file.nTokens ?? 0), 0);
    const subject = this.#attachments.length === 1 ? `${this.#attachments[0].name} has` : "The files have";
    this.#tellIfTooLong(subject, nTokens);
  }

  // Return whether tokens fit into the context; if not, say so.
  #tellIfTooLong(subject, nTokens) {
    const { nContext } = this.#modelMenu;
    if (nContext === null || nTokens < nContext) {
      return true;
    }
    showNotice(
      `${subject} ${tokens(nTokens)}, but the model's context has only ${tokens(nContext)}: ` +
        `remove or shorten a file, or start the server with a larger context (-c ${2 * nTokens}).`,
    );
    return false;
  }

  #show() {
    this.#list.replaceChildren(...this.#attachments.map((attachment) => this.#item(attachment)));
    this.#list.hidden = this.#attachments.length === 0;
  }

  #item(attachment) {
    const { nContext } = this.#modelMenu;
    const label = document.createElement("span");
    label.textContent = nameWithSize(attachment);
    if (attachment.nTokens === undefined) {
      label.textContent += ` · ${COUNTING}`;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "✕";
    button.ariaLabel = `Remove ${attachment.name}`;
    button.addEventListener("click", () => this.#remove(attachment));
    const item = document.createElement("li");
    const isTooLong = nContext !== null && attachment.nTokens >= nContext;
    item.classList.toggle("too-long", isTooLong);
    if (isTooLong) {
      label.textContent += ", too long";
    }
    item.append(label, button);
    return item;
  }

  #remove(attachment) {
    this.#attachments = this.#attachments.filter((other) => other !== attachment);
    this.#show();
    showNotice("");
    document.getElementById("question").focus();
  }
}
