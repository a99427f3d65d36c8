// The server's API, as far as the page needs it. Addresses are relative to the page's own, so that
// a proxy may serve it below a path.

const KEY = "specgen-api-key";
const UNREACHABLE = "The server cannot be reached.";
const CUT_OFF = "The connection was lost before the answer ended.";

// What went wrong, in a sentence for the user.
export class ServerError extends Error {
  // `code` is the server's name for the kind of error.
  constructor(message, code = null) {
    super(message);
    // The code also stands for prompts over the server's --limit-prompt.
    this.isContextTooSmall = code === "context_length_exceeded" && message.includes("the context has");
  }
}

export class Client {
  // `askForKey(isRefused)` resolves to an API key, or to null if the user has none.
  constructor(askForKey) {
    this.askForKey = askForKey;
  }

  // The names of all models that generate text.
  async models() {
    const models = await (await this.request("v1/models")).json();
    return models.data.filter((model) => model.type !== "embeddings").map((model) => model.id);
  }

  // What /props tells of a model; its name only, if it is not loaded.
  async about(model) {
    return (await this.request(`props?model=${encodeURIComponent(model)}`)).json();
  }

  // The chunks of an answer as they arrive. Raises ServerError, and AbortError when `signal`
  // aborts it.
  async *answer(body, signal) {
    const response = await this.request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    });
    const events = eventData(response.body);
    for (;;) {
      const { value, done } = await orServerError(events.next(), CUT_OFF);
      signal.throwIfAborted(); // what arrived before is not wanted any more
      if (done) {
        throw new ServerError(CUT_OFF);
      }
      if (value === "[DONE]") {
        await events.return();
        return;
      }
      const chunk = JSON.parse(value);
      if (chunk.error) {
        throw new ServerError(chunk.error.message);
      }
      yield chunk;
    }
  }

  // A response that is well. Where the server wants a key, the user is asked until one fits.
  async request(address, options = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const authorization = key === null ? {} : { Authorization: `Bearer ${key}` };
      const headers = { ...options.headers, ...authorization };
      const response = await orServerError(fetch(address, { ...options, headers }), UNREACHABLE);
      if (response.ok) {
        return response;
      }
      if (response.status !== 401) {
        throw await errorOf(response);
      }
      sessionStorage.removeItem(KEY);
      const entered = await this.askForKey(key !== null);
      if (entered === null) {
        throw new ServerError("The server wants an API key.");
      }
      sessionStorage.setItem(KEY, entered);
    }
  }
}

async function orServerError(promise, message) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(message);
  }
}

async function errorOf(response) {
  try {
    const { message, code } = (await response.json()).error;
    return new ServerError(message, code);
  } catch {
    return new ServerError(`The server answered with status ${response.status}.`);
  }
}

// The data of each server-sent event in the body of a response. Bytes may arrive cut anywhere,
// within a character too. Lines end with \n or \r\n; those that begin with a colon are comments.
async function* eventData(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let line = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const pieces = (line + decoder.decode(value, { stream: !done })).split("\n");
      line = pieces.pop();
      for (const piece of pieces) {
        const whole = piece.replace(/\r$/, "");
        if (whole.startsWith("data:")) {
          data.push(whole.slice("data:".length).replace(/^ /, ""));
        } else if (whole === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) {
        return;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // whoever stops reading closes the connection
  }
}
