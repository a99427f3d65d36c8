import { turnsToLeaveOut } from "./context_window.js";
import { messageOf } from "./notice.js";
import { maxTokens, requestFields, withSystemPrompt } from "./settings.js";

// The maximum time without a pause for the browser's other work.
const MAX_WORK_MS = 20;

/** Lets the server answer questions; each conversation can have one answer that is arriving. */
export class Answerer {
  #client;
  #modelMenu;
  #keepEndInView;
  #onChange;
  // The server's limit for prompts, known once a prompt was over it.
  #promptLimit = Infinity;
  // The answers that are arriving, by their conversation: what aborts each, and when it has ended.
  #running = new Map();

  /**
   * @param {import("./api_client.js").ApiClient} client
   * @param {import("./model_menu.js").ModelMenu} modelMenu
   * @param {function(function(): void): void} keepEndInView - makes a change to a turn, and keeps
   *   the end of the conversation in view
   * @param {function(): void} onChange - called when an answer begins or ends
   */
  constructor(client, modelMenu, keepEndInView, onChange) {
    this.#client = client;
    this.#modelMenu = modelMenu;
    this.#keepEndInView = keepEndInView;
    this.#onChange = onChange;
  }

  isAnswering(conversation) {
    return this.#running.has(conversation);
  }

  /** The conversations whose answer is arriving. */
  get conversations() {
    return [...this.#running.keys()];
  }

  /** Return the conversation with this id if an answer to it is arriving. */
  conversationWith(id) {
    return this.conversations.find((conversation) => conversation.id === id);
  }

  /** Let the last turn of a conversation be answered, and resolve when the answer has ended. */
  async answer(conversation, turn) {
    const controller = new AbortController();
    const ended = this.#answer(conversation, turn, controller.signal);
    this.#running.set(conversation, { controller, ended });
    this.#onChange();
    await ended;
    controller.abort(); // if the error was in this page, the server is still answering
    this.#running.delete(conversation);
    this.#keepEndInView(this.#onChange);
  }

  /** Stop the answer to a conversation, if one is arriving; resolves when it is stored. */
  async stop(conversation) {
    const running = this.#running.get(conversation);
    running?.controller.abort();
    await running?.ended;
  }

  async #answer(conversation, turn, signal) {
    const { leftOut } = conversation;
    try {
      const body = await this.#requestBody(conversation, turn, signal);
      turn.begin(body);
      await this.#receive(turn, body, signal);
      if (this.#modelMenu.isModelUnloaded) {
        await this.#modelMenu.describe();
      }
      this.#keepEndInView(() => turn.end(this.#modelMenu.nContext));
    } catch (error) {
      this.#promptLimit = error.promptLimit ?? this.#promptLimit;
      this.#keepEndInView(() => {
        if (signal.aborted) {
          turn.stop();
        } else {
          turn.fail(messageOf(error));
        }
      });
      if (turn.text === "") {
        conversation.leaveOut(leftOut); // the model has not seen the shorter conversation
      }
    }
    await conversation.save(turn);
  }

  // The body of the request, without the oldest turns if they do not fit into the context.
  async #requestBody(conversation, turn, signal) {
    await this.#modelMenu.fillIfEmpty();
    const fields = { return_progress: true, ...requestFields() };
    const bodyWithout = (nTurns) => ({
      messages: withSystemPrompt([...conversation.messages(nTurns), turn.questionMessage()]),
      ...fields,
    });
    if (conversation.nTurns > 1) {
      await this.#leaveOutOldTurns(conversation, (nTurns) =>
        this.#client.countTokens(bodyWithout(nTurns), signal),
      );
    }
    return bodyWithout(conversation.leftOut?.nTurns ?? 0);
  }

  async #leaveOutOldTurns(conversation, countTokens) {
    if (this.#modelMenu.nContext === null) {
      await countTokens(0); // loads the model
      await this.#modelMenu.describe();
    }
    if (this.#modelMenu.nContext === null) {
      return;
    }
    const nContext = Math.min(this.#modelMenu.nContext, this.#promptLimit);
    // With another context, the model may see all turns again.
    const { leftOut } = conversation;
    const nLeftOut = await turnsToLeaveOut(
      {
        nTurns: conversation.nTurns - 1,
        nLeftOut: leftOut?.nContext === nContext ? leftOut.nTurns : 0,
      },
      nContext,
      maxTokens() ?? this.#modelMenu.maxTokens,
      countTokens,
    );
    conversation.leaveOut(nLeftOut > 0 ? { nTurns: nLeftOut, nContext } : null);
  }

  // Add the chunks of an answer to its turn.
  async #receive(turn, body, signal) {
    let pausedAtMs = performance.now();
    for await (const chunk of this.#client.streamAnswer(body, signal)) {
      this.#keepEndInView(() => turn.add(chunk));
      if (performance.now() - pausedAtMs > MAX_WORK_MS) {
        await pause();
        pausedAtMs = performance.now();
      }
    }
  }
}

// Let the browser handle keys, clicks and drawing. If chunks arrive faster than they can be shown,
// it gets no other chance. A timer would fire only once a second in a hidden tab.
function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
