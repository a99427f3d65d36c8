import { messageOf, showNotice } from "./notice.js";
import { offerDrafts, savedSetting, showDefaults } from "./settings.js";

/** The menu of models, and the line that describes the chosen one. */
export class ModelMenu {
  /** Whether the server loads the chosen model only when it is asked a question. */
  isModelUnloaded = false;
  /** The size of the chosen model's context in tokens; null if it is not known. */
  nContext = null;
  /** The maximum length of an answer in tokens, unless a request has another; null if not known. */
  maxTokens = null;

  #client;
  #menu = document.getElementById("model");
  #description = document.getElementById("about");

  /** @param {import("./api_client.js").ApiClient} client */
  constructor(client) {
    this.#client = client;
  }

  /** Offer the server's models, and choose the one of the last visit. */
  async fill() {
    try {
      const models = await this.#client.models();
      const saved = savedSetting("model");
      this.#menu.replaceChildren(...models.map((model) => new Option(model)));
      this.#menu.hidden = models.length === 1;
      this.#menu.value = models.includes(saved) ? saved : models[0];
      await this.describe();
    } catch (error) {
      showNotice(messageOf(error));
    }
  }

  /** Offer the server's models if they are not known, because it could not be reached before. */
  async fillIfEmpty() {
    if (this.#menu.length === 0) {
      await this.fill();
    }
  }

  /** Show which model answers and what drafts for it, as far as the server knows. */
  async describe() {
    const model = this.#menu.value;
    try {
      const properties = await this.#client.properties(model);
      if (model === this.#menu.value) { // the user has not chosen another one meanwhile
        this.#show(model, properties);
      }
    } catch (error) {
      showNotice(messageOf(error));
    }
  }

  #show(model, properties) {
    const { draft = null, has_chat_template: hasChatTemplate = true } = properties;
    const drafts = draftDescription(draft);
    this.#description.textContent = this.#menu.hidden ? `${model} · ${drafts}` : drafts;
    this.isModelUnloaded = draft === null;
    const { n_ctx: nContext = null, params = {} } = properties.default_generation_settings ?? {};
    this.nContext = nContext;
    this.maxTokens = params.max_tokens >= 0 ? params.max_tokens : null;
    showDefaults(params);
    offerDrafts(draft !== "none");
    if (!hasChatTemplate) {
      showNotice("This model has no chat template: it may not follow the form of a chat.");
    }
  }
}

// The server does not know the drafter of a model that is not loaded.
function draftDescription(draft) {
  switch (draft) {
    case null:
      return "loaded with the first question";
    case "none":
      return "no drafts";
    case "ngram":
      return "drafts from n-grams";
    default:
      return `drafts from ${draft.replace(/\.gguf$/, "")}`;
  }
}
