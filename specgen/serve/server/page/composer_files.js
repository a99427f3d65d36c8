import { listenForFiles } from "./file_sources.js";
import { messageOf, showNotice } from "./notice.js";
import { fenced, nameWithSize, questionWithFiles, tokenCount } from "./question_files.js";
import { requestFields, withSystemPrompt } from "./settings.js";
import { FileError, readTextFile } from "./text_file.js";
import { message } from "./turn.js";

/** The files that will be sent with the next question. */
export class ComposerFiles {
  #client;
  #modelMenu;
  #list = document.getElementById("files");
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
    listenForFiles((files) => this.#add(files));
  }

  /** Remove the files from the composer, and return them. */
  take() {
    const taken = this.#attachments;
    this.#attachments = [];
    this.#show();
    return taken;
  }

  /** Whether a question with the files fits into the context. If not, the user is told. */
  async fit(question) {
    if (this.#attachments.length === 0) {
      return true;
    }
    await this.#counting;
    const asked = message("user", questionWithFiles(question, this.#attachments));
    const messages = withSystemPrompt([asked]);
    try {
      const nTokens = await this.#client.countTokens({ ...requestFields(), messages });
      return this.#checkFits("The question with its files has", nTokens);
    } catch (error) {
      showNotice(messageOf(error));
      return false;
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
    showNotice(problems.join(" "));
    document.getElementById("question").focus();
    if (added.length > 0) {
      this.#counting = this.#counting.then(() => this.#count(added));
    }
  }

  async #count(attachments) {
    try {
      await this.#modelMenu.fillIfEmpty();
      const { model } = requestFields();
      for (const attachment of attachments) {
        attachment.nTokens = await this.#client.countTextTokens(model, fenced(attachment));
      }
      if (this.#modelMenu.isModelUnloaded) {
        await this.#modelMenu.describe(); // counting has loaded it, and its context is known now
      }
    } catch (error) {
      showNotice(messageOf(error));
      return;
    }
    this.#show();
    const [first, ...others] = this.#attachments;
    if (first !== undefined) {
      const nTokens = this.#attachments.reduce((sum, file) => sum + (file.nTokens ?? 0), 0);
      const subject = others.length === 0 ? `${first.name} has` : "The files together have";
      this.#checkFits(subject, nTokens);
    }
  }

  // Return whether tokens fit into the context; if not, tell the user.
  #checkFits(subject, nTokens) {
    const { nContext } = this.#modelMenu;
    if (nContext === null || nTokens < nContext) {
      return true;
    }
    showNotice(
      `${subject} ${tokenCount(nTokens)}, but the model's context has only ` +
        `${nContext.toLocaleString("en")}: remove or shorten a file, or start the server with a ` +
        `larger context (-c ${2 * nTokens}).`,
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
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "✕";
    button.ariaLabel = `Remove ${attachment.name}`;
    button.addEventListener("click", () => this.#remove(attachment));
    const item = document.createElement("li");
    item.classList.toggle("too-long", nContext !== null && attachment.nTokens >= nContext);
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
