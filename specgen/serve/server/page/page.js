// A chat with the server that serves this page. The conversation is stored in this browser only.

import { ApiClient } from "./api_client.js";
import { copyText } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { askForKey } from "./key_dialog.js";
import { ModelMenu } from "./model_menu.js";
import { messageOf, showNotice } from "./notice.js";
import {
  applyTokenDisplay,
  requestFields,
  restoreSettings,
  saveSettings,
  systemPrompt,
} from "./settings.js";
import { loadItem } from "./storage.js";
import { fillLegend } from "./tokens.js";
import { message, Turn } from "./turn.js";

// The maximum time without a pause for the browser's other work.
const MAX_WORK_MS = 20;
// The label of a button after it has copied something.
const COPIED = "Copied";
// The time for which the button has that label.
const COPIED_MS = 1500;

const elementOf = (id) => document.getElementById(id);
const composer = elementOf("composer");
const question = elementOf("question");
const sendButton = elementOf("send");
const stopButton = elementOf("stop");
const conversation = new Conversation(elementOf("conversation"));
const keepEndInView = (change) => conversation.keepEndInView(change);
const client = new ApiClient(askForKey);
const modelMenu = new ModelMenu(client);

// The AbortController of the answer that is arriving; null if there is none.
let running = null;

listen();
fillLegend(document.querySelector(".legend"));
restoreSettings();
applyTokenDisplay();
restoreConversation();
modelMenu.fill();

// --- events ------------------------------------------------------------------------------------

function listen() {
  listenToComposer();
  listenToSettings();
  listenToConversation();
  addEventListener("pagehide", () => {
    running?.abort(); // otherwise the browser does, which looks like an error
    conversation.save();
  });
  // Phones close hidden pages without an event.
  document.addEventListener("visibilitychange", () => conversation.save());
}

function listenToComposer() {
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    const isSubmit = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (isSubmit) {
      event.preventDefault();
      composer.requestSubmit();
    }
  });
  stopButton.addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      running?.abort();
    }
  });
}

function listenToSettings() {
  composer.addEventListener("change", saveSettings);
  elementOf("model").addEventListener("change", () => {
    saveSettings();
    modelMenu.describe();
  });
  for (const name of ["colours", "rejected"]) {
    elementOf(name).addEventListener("change", () => keepEndInView(applyTokenDisplay));
  }
  // The browser can only point at an invalid setting if it is unfolded.
  const unfold = (event) => event.target.closest("details")?.setAttribute("open", "");
  composer.addEventListener("invalid", unfold, { capture: true });
}

function listenToConversation() {
  elementOf("new").addEventListener("click", () => {
    running?.abort();
    conversation.clear();
    conversation.save();
    question.focus();
  });
  elementOf("conversation").addEventListener("click", (event) => {
    const button = event.target.closest(".copy");
    if (button !== null) {
      copyFor(button);
    }
  });
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      question.value = example.textContent.replace(/\s+/g, " ").trim();
      composer.requestSubmit();
    });
  }
}

// Copy the block of code that the button belongs to, or the whole answer.
async function copyFor(button) {
  const code = button.parentElement.querySelector("pre");
  const text = code === null ? conversation.turnWith(button).text : code.textContent;
  await copyText(text);
  const label = button.textContent;
  if (label === COPIED) {
    return; // it was clicked before, and gets its label back soon
  }
  button.textContent = COPIED;
  setTimeout(() => {
    button.textContent = label;
  }, COPIED_MS);
}

// --- turns -------------------------------------------------------------------------------------

function restoreConversation() {
  try {
    for (const saved of loadItem("turns") ?? []) {
      addTurn(Turn.restored(saved, keepEndInView));
    }
  } catch (error) {
    console.warn(error); // another version of this page stored them
  }
  // The introduction, which only an empty conversation shows, is read from its beginning.
  if (!conversation.isEmpty) {
    conversation.scrollToEnd();
  }
}

// Add a turn at the end of the conversation, with what its buttons do.
function addTurn(turn) {
  turn.onClick("retry", () => {
    conversation.removeLast();
    ask(turn.question);
  });
  turn.onClick("edit", () => {
    conversation.removeLast();
    conversation.save();
    question.value = [turn.question, question.value].filter(Boolean).join("\n\n");
    question.focus();
  });
  turn.onClick("replay", () => saveReplay(turn));
  conversation.add(turn);
}

async function saveReplay(turn) {
  try {
    const response = await client.request("page/replay.html");
    turn.downloadReplay(await response.text());
  } catch (error) {
    showNotice(messageOf(error));
  }
}

// --- answers -----------------------------------------------------------------------------------

function send() {
  const text = question.value.trim();
  if (text === "" || running !== null) {
    return;
  }
  question.value = "";
  ask(text);
}

async function ask(text) {
  showNotice("");
  const messages = messagesWith(text);
  const turn = new Turn(text, keepEndInView);
  addTurn(turn);
  conversation.scrollToEnd();
  const controller = new AbortController();
  const { signal } = controller;
  setRunning(controller);
  try {
    await receive(turn, { messages, return_progress: true, ...requestFields() }, signal);
    if (modelMenu.isModelUnloaded) {
      await modelMenu.describe();
    }
    keepEndInView(() => turn.end(modelMenu.nContext));
  } catch (error) {
    keepEndInView(() => (signal.aborted ? turn.stop() : turn.fail(messageOf(error))));
  } finally {
    controller.abort(); // if the error was in this page, the server is still answering
    if (running === controller) {
      keepEndInView(() => setRunning(null));
    }
    conversation.save();
  }
}

// The messages of a request: the system prompt, the conversation so far, and the question.
function messagesWith(text) {
  const messages = [...conversation.messages(), message("user", text)];
  if (systemPrompt() !== null) {
    messages.unshift(message("system", systemPrompt()));
  }
  return messages;
}

// Add the chunks of an answer to its turn.
async function receive(turn, body, signal) {
  let pausedAtMs = performance.now();
  for await (const chunk of client.streamAnswer(body, signal)) {
    keepEndInView(() => turn.add(chunk));
    if (performance.now() - pausedAtMs > MAX_WORK_MS) {
      await pause();
      pausedAtMs = performance.now();
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

// Show that an answer is arriving, or, with null, that there is none.
function setRunning(controller) {
  running = controller;
  const isRunning = controller !== null;
  const hadFocus = [sendButton, stopButton].includes(document.activeElement);
  sendButton.hidden = isRunning;
  stopButton.hidden = !isRunning;
  if (hadFocus) {
    const shownButton = isRunning ? stopButton : sendButton;
    shownButton.focus();
  }
  document.body.classList.toggle("busy", isRunning);
  conversation.setBusy(isRunning);
}
