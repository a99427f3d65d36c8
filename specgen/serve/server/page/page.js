// Chats with the server that serves this page. The conversations are stored in this browser only.

import { Answerer } from "./answerer.js";
import { ApiClient } from "./api_client.js";
import { ComposerFiles } from "./composer_files.js";
import { Conversation } from "./conversation.js";
import { ConversationActions } from "./conversation_actions.js";
import { ConversationList } from "./conversation_list.js";
import { ConversationStore } from "./conversation_store.js";
import { ConversationView } from "./conversation_view.js";
import { askForKey } from "./key_dialog.js";
import { isSubmitKey } from "./keys.js";
import { closeList, isListOpen, listenToListPanel } from "./list_panel.js";
import { ModelMenu } from "./model_menu.js";
import { NOT_STORED, showNotice } from "./notice.js";
import {
  applyTokenDisplay,
  onOtherTabsSettings,
  restoreSettings,
  saveSettings,
} from "./settings.js";
import { listenToPanel } from "./settings_panel.js";
import { TokenInspector } from "./token_inspector.js";
import { fillLegend } from "./tokens.js";
import { TurnActions } from "./turn_actions.js";
import { withdrawUndo } from "./undo_bar.js";

const NOT_HERE = "This browser has no such conversation.";
const DELETED_ELSEWHERE = "The conversation was deleted in another tab.";
// If the browser has not left the page after this time, it probably does not.
const MAX_LEAVING_MS = 3000;

const elementOf = (id) => document.getElementById(id);
const composer = elementOf("composer");
const question = elementOf("question");
const sendButton = elementOf("send");
const stopButton = elementOf("stop");
const view = new ConversationView(elementOf("conversation"));
const keepEndInView = (change) => view.keepEndInView(change);
const client = new ApiClient(askForKey);
const modelMenu = new ModelMenu(client);
const answerer = new Answerer(client, modelMenu, keepEndInView, showState);
const composerFiles = new ComposerFiles(client, modelMenu);
const inspector = new TokenInspector(client, elementOf("conversation"), (element) =>
  current.turnWith(element),
);
const store = new ConversationStore();
const list = new ConversationList(store);
const actions = new ConversationActions(store, answerer, list);
const offerToRestore = (text, backup) => actions.offerToRestore(text, backup);
const turnActions = new TurnActions(client, store, answerer, offerToRestore, ask);

// The conversation that is shown. A new one is stored with its first question.
let current = newConversation();
// Ends an attempt to leave the page.
let stayTimer = null;

listen();
fillLegend(document.querySelector(".legend"));
restoreSettings();
applyTokenDisplay();
show(current);
openStored();
modelMenu.fill();

// --- events ------------------------------------------------------------------------------------

function listen() {
  listenToComposer();
  listenToSettings();
  listenToConversation();
  listenToList();
  document.addEventListener("keydown", handleEscape);
  addEventListener("hashchange", openAddress);
  addEventListener("pagehide", leave);
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) {
      comeBack();
    }
  });
  // Phones close hidden pages without an event.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      answerer.conversations.forEach((conversation) => conversation.save());
    }
  });
}

function listenToComposer() {
  // Not a link to follow: the address names the conversation.
  elementOf("skip").addEventListener("click", (event) => {
    event.preventDefault();
    question.focus();
  });
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    if (isSubmitKey(event)) {
      event.preventDefault();
      composer.requestSubmit();
    }
  });
  stopButton.addEventListener("click", () => answerer.stop(current));
}

function listenToSettings() {
  listenToPanel();
  composer.addEventListener("change", saveSettings);
  elementOf("model").addEventListener("change", () => {
    saveSettings();
    showNotice("");
    modelMenu.describe();
  });
  for (const name of ["colours", "rejected"]) {
    elementOf(name).addEventListener("change", () => keepEndInView(applyTokenDisplay));
  }
  onOtherTabsSettings(followSettings);
}

// Show the settings that another tab has changed.
function followSettings() {
  restoreSettings();
  keepEndInView(applyTokenDisplay);
}

function listenToConversation() {
  onTurnButton("copy", (turn, button) => turnActions.copy(turn, button));
  onTurnButton("retry", (turn) => turnActions.retry(turn, current));
  onTurnButton("edit", (turn, button) => turnActions.edit(turn, current, button));
  onTurnButton("replay", (turn) => turnActions.saveReplay(turn));
  onTurnButton("inspect", (turn) => inspector.open(turn));
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      question.value = example.textContent.replace(/\s+/g, " ").trim();
      composer.requestSubmit();
    });
  }
}

function listenToList() {
  listenToListPanel();
  elementOf("new").addEventListener("click", startNew);
  elementOf("rows").addEventListener("click", ({ target }) => {
    if (target.closest("a") !== null) {
      closeList();
    }
  });
  onButton(elementOf("rows"), "markdown", (row) => actions.exportMarkdown(list.takeAction(row)));
  onButton(elementOf("rows"), "json", (row) => actions.exportJson(list.takeAction(row)));
  onButton(elementOf("rows"), "delete", (row) => actions.delete(list.takeAction(row)));
  const importField = elementOf("import-file");
  elementOf("import").addEventListener("click", () => importField.click());
  importField.addEventListener("change", () => {
    actions.importFile(importField.files[0]);
    importField.value = ""; // so that the same file can be chosen again
  });
  store.onChange((id, isFromOtherTab) => {
    list.refresh(id);
    if (id === current.id) {
      followStore(id, isFromOtherTab);
    }
  });
}

// Call `act` with the turn and the button when a button of this class is clicked in a turn.
function onTurnButton(className, act) {
  onButton(elementOf("conversation"), className, (button) => {
    act(current.turnWith(button), button);
  });
}

// Call `act` with each button of this class that is clicked in an element.
function onButton(element, className, act) {
  element.addEventListener("click", ({ target }) => {
    const button = target.closest(`button.${className}`);
    if (button !== null) {
      act(button);
    }
  });
}

function handleEscape(event) {
  const isOfDialog = document.querySelector("dialog[open]") !== null;
  if (event.key !== "Escape" || isOfDialog) {
    return;
  }
  if (isListOpen()) {
    closeList();
  } else if (inspector.isOpen) {
    inspector.close();
  } else {
    answerer.stop(current);
  }
}

// --- which conversation is shown -----------------------------------------------------------------

function newConversation() {
  return new Conversation(store, keepEndInView);
}

function show(conversation) {
  current = conversation;
  view.show(conversation);
  inspector.closeWithoutTurn();
  showIdentity();
  showState();
}

// Tell in the address, in the list and in the window's title which conversation is shown.
function showIdentity() {
  if (current.isStored && idInAddress() !== current.id) {
    history.replaceState(null, "", `#${current.id}`);
  }
  list.setCurrent(current.id);
  document.title = current.isEmpty ? "specgen" : `${current.shownTitle} – specgen`;
}

function idInAddress() {
  return location.hash.slice(1);
}

// Fill the list of conversations, and show the one of the last visit to this tab.
async function openStored() {
  try {
    await list.fill();
    await openAddress();
  } catch (error) {
    console.warn(error); // the storage is blocked
    showNotice(NOT_STORED);
  }
}

// Leave the answers that are arriving to other pages, or to this one when it is shown again.
function leave() {
  clearTimeout(stayTimer);
  for (const conversation of answerer.conversations) {
    conversation.leave();
    answerer.stop(conversation); // otherwise the browser does, which looks like an error
  }
}

// The same before the browser asks for the next page, while an answer is arriving: Firefox then
// ends the connection at once, and Safari stores nothing any more once it has hidden the page. If
// there is no next page after all, such as when a file is downloaded, this one comes back.
function leaveSoon() {
  leave();
  stayTimer = setTimeout(comeBack, MAX_LEAVING_MS);
}

// The browser has kept the page, and shows it again: catch up with what has changed meanwhile.
async function comeBack() {
  followSettings();
  await Promise.all(answerer.conversations.map((conversation) => answerer.stop(conversation)));
  try {
    await store.takeUpLeft();
    await list.fill();
    await followStore(current.id, true);
  } catch (error) {
    console.warn(error); // the storage is blocked
  }
}

// Show the conversation in the address; a new one if there is none.
async function openAddress() {
  const id = idInAddress();
  if (id === "") {
    if (current.isStored) {
      show(newConversation());
    }
    return;
  }
  // One whose answer is arriving has more than the store.
  const conversation = answerer.conversationWith(id) ?? (await storedConversation(id));
  if (id !== idInAddress() || id === current.id) {
    return; // the user has gone on to another one, or has asked a question
  }
  if (conversation === null) {
    leaveConversation();
    showNotice(NOT_HERE);
  } else {
    show(conversation);
  }
}

// The conversation with this id as it is stored; null if it is not.
async function storedConversation(id) {
  const saved = await store.get(id);
  return saved === undefined ? null : Conversation.restored(saved, store, keepEndInView);
}

// Begin a conversation. An answer that is arriving in the last one goes on.
function startNew() {
  if (idInAddress() !== "") {
    history.pushState(null, "", location.href); // so that the last one is a step back
  }
  closeList();
  showNotice("");
  leaveConversation();
  question.focus();
}

// Show an empty conversation in place of one that is gone.
function leaveConversation() {
  history.replaceState(null, "", location.pathname + location.search);
  show(newConversation());
}

// Show what the store has of the current conversation, which this tab or another one has changed.
async function followStore(id, isFromOtherTab) {
  const saved = await store.get(id);
  if (id !== current.id || answerer.isAnswering(current)) {
    return;
  }
  if (saved !== undefined) {
    keepEndInView(() => current.update(saved));
    inspector.closeWithoutTurn();
    showIdentity();
  } else if (current.isStored) {
    leaveConversation();
    if (isFromOtherTab) {
      showNotice(DELETED_ELSEWHERE);
    }
  }
}

// --- asking --------------------------------------------------------------------------------------

async function send() {
  const conversation = current;
  const text = question.value.trim();
  if (text === "" || question.readOnly || answerer.isAnswering(conversation)) {
    return;
  }
  // Counting the tokens of files takes time. The question stays as it was sent, and belongs to its
  // conversation even if the user goes on to another one.
  question.readOnly = true;
  const fits = await composerFiles.fit(text);
  question.readOnly = false;
  if (fits && !answerer.isAnswering(conversation)) {
    question.value = "";
    ask(conversation, text, composerFiles.take());
  }
}

// Ask a question at the end of a conversation; resolves to its turn when the answer has ended.
async function ask(conversation, text, attachments) {
  showNotice("");
  withdrawUndo(conversation.id);
  inspector.close();
  const turn = conversation.ask(text, attachments);
  view.scrollToEnd();
  conversation.save().then(showIdentity);
  await answerer.answer(conversation, turn);
  inspector.endTurn(turn);
  showIdentity(); // it has another one if it was stored as a copy
  return turn;
}

// Only while an answer arrives, because Firefox keeps no page with this listener to go back to.
function listenForLeaving() {
  if (answerer.conversations.length > 0) {
    addEventListener("beforeunload", leaveSoon);
  } else {
    removeEventListener("beforeunload", leaveSoon);
  }
}

// Show whether the conversation is empty, and whether an answer to it is arriving.
function showState() {
  const isRunning = answerer.isAnswering(current);
  document.body.classList.toggle("empty", current.isEmpty);
  const hadFocus = [sendButton, stopButton].includes(document.activeElement);
  sendButton.hidden = isRunning;
  stopButton.hidden = !isRunning;
  if (hadFocus) {
    const shownButton = isRunning ? stopButton : sendButton;
    shownButton.focus();
  }
  current.setBusy(isRunning);
  listenForLeaving();
  list.setAnswering(answerer.conversations.map(({ id }) => id));
}
