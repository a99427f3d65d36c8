// The part of the server's API that the page uses. Addresses are relative to the page's own, so
// that a proxy may serve it below a path.

// The name of the API key in the session storage, which lasts as long as the tab.
const API_KEY_ITEM = "specgen-api-key";
const UNREACHABLE = "The server cannot be reached.";
const CONNECTION_LOST = "The connection was lost before the answer ended.";

/** An error whose message is a sentence for the user. */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {string|null} code - the server's name for the kind of error
   * @param {number|null} nAllowed - the tokens that are allowed, if a prompt has too many
   */
  constructor(message, code = null, nAllowed = null) {
    super(message);
    const isPromptTooLong = code === "context_length_exceeded";
    /**
     * Whether the prompt does not fit into the context. Prompts over the server's --limit-prompt
     * have the same code, but another message.
     */
    this.isContextTooSmall = isPromptTooLong && message.includes("the context has");
    /** The server's --limit-prompt, if the prompt is over it; else null. */
    this.promptLimit = isPromptTooLong && !this.isContextTooSmall ? nAllowed : null;
  }
}

export class ApiClient {
  #askForKey;
  // The API key; null if there is none.
  #key = storedKey();

  /**
   * @param {function(boolean): Promise<string|null>} askForKey - asks the user for an API key, and
   *   resolves to null if there is none; its argument tells whether the server rejected a key
   */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  /** Return the names of all models that generate text. */
  async models() {
    const response = await this.request("v1/models");
    const { data } = await response.json();
    return data.filter(({ type }) => type !== "embeddings").map(({ id }) => id);
  }

  /** Return the properties of a model; of one that is not loaded, only its name. */
  async properties(model) {
    const response = await this.request(`props?model=${encodeURIComponent(model)}`);
    return response.json();
  }

  /** Return the number of tokens of the prompt that the body of a question makes. */
  async countTokens(body, signal) {
    const response = await this.#post("v1/chat/completions/input_tokens", body, signal);
    const { input_tokens: nTokens } = await response.json();
    return nTokens;
  }

  /** Return the number of tokens of a text. */
  async countTextTokens(model, text) {
    const response = await this.#post("tokenize", { model, content: text });
    const { tokens } = await response.json();
    return tokens.length;
  }

  /** Return how likely the tokens of an answer were; `body` has the question and the answer. */
  async tokenProbabilities(body) {
    const response = await this.#post("v1/chat/completions/token_probabilities", body);
    return response.json();
  }

  /**
   * Yield the chunks of an answer as they arrive.
   *
   * Throws a ServerError, or an AbortError if `signal` aborts the request.
   */
  async *streamAnswer(body, signal) {
    const request = { ...body, stream: true };
    const response = await this.#post("v1/chat/completions", request, signal);
    const events = eventData(response.body);
    for (;;) {
      const { value: data, done } = await orServerError(events.next(), CONNECTION_LOST);
      signal.throwIfAborted(); // nobody wants data that arrived before the abort any more
      if (done) {
        throw new ServerError(CONNECTION_LOST);
      }
      if (data === "[DONE]") {
        await events.return();
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new ServerError(chunk.error.message);
      }
      yield chunk;
    }
  }

  /**
   * Return a successful response, or throw a ServerError.
   *
   * If the server requires an API key, the user is asked until one is accepted.
   *
   * @param {string} address - relative to the page's own
   * @param {RequestInit} options - as for `fetch`; the key is added to the headers
   */
  async request(address, options = {}) {
    for (;;) {
      const key = this.#key;
      const response = await orServerError(fetchWithKey(address, options, key), UNREACHABLE);
      if (response.ok) {
        return response;
      }
      if (response.status !== 401) {
        throw await errorOf(response);
      }
      if (key === this.#key) { // it was not replaced for another request meanwhile
        await this.#replaceKey();
      }
    }
  }

  #post(address, body, signal) {
    return this.request(address, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
  }

  async #replaceKey() {
    const isRejected = this.#key !== null;
    this.#key = await this.#askForKey(isRejected);
    storeKey(this.#key);
    if (this.#key === null) {
      throw new ServerError("The server requires an API key.");
    }
  }
}

// The key that was stored in this tab; null if there is none, or if the storage is blocked.
function storedKey() {
  try {
    return sessionStorage.getItem(API_KEY_ITEM);
  } catch {
    return null;
  }
}

function storeKey(key) {
  try {
    if (key === null) {
      sessionStorage.removeItem(API_KEY_ITEM);
    } else {
      sessionStorage.setItem(API_KEY_ITEM, key);
    }
  } catch {
    // Blocked: the page asks for the key again when it is reloaded.
  }
}

function fetchWithKey(address, options, key) {
  const headers = { ...options.headers };
  if (key !== null) {
    headers.Authorization = `Bearer ${key}`;
  }
  return fetch(address, { ...options, headers });
}

// Await a promise. Any error except an abort becomes a ServerError with this message.
async function orServerError(promise, message) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ServerError(message);
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ServerError(error.message, error.code, error.n_ctx ?? null);
  } catch {
    return new ServerError(`The server answered with status ${response.status}.`);
  }
}

// The data of each server-sent event. An empty line ends an event; lines that begin with a colon
// are comments.
async function* eventData(body) {
  let dataLines = [];
  for await (const line of linesOf(body)) {
    if (line.startsWith("data:")) {
      dataLines.push(line.slice("data:".length).replace(/^ /, ""));
    } else if (line === "" && dataLines.length > 0) {
      yield dataLines.join("\n");
      dataLines = [];
    }
  }
}

// The complete lines in the body of a response, which end with \n or \r\n. Bytes may be split
// anywhere, even within a character.
async function* linesOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let unfinishedLine = "";
  try {
    for (;;) {
      const { value: bytes, done } = await reader.read();
      const text = unfinishedLine + decoder.decode(bytes, { stream: !done });
      const lines = text.split("\n");
      unfinishedLine = lines.pop();
      for (const line of lines) {
        yield line.replace(/\r$/, "");
      }
      if (done) {
        return;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // a caller that stops reading closes the connection
  }
}
