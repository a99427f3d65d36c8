// A chat with the server that serves this page. The conversation is kept in this browser only.

import { Client, ServerError } from "./client.js";
import { copy } from "./clipboard.js";
import { keep, kept } from "./kept.js";
import { fillLegend } from "./marks.js";
import { said, Turn } from "./turn.js";

const part = (id) => document.getElementById(id);
const client = new Client(askForKey);
const conversation = part("conversation");
const question = part("question");
const LONGEST_MS = 20; // without a pause
const TOO_SMALL =
  "shorten the question, begin a new conversation, or start the server with a larger context (-c)";
const COPIED_MS = 1500;
const SETTINGS = ["model", "draft", "colours", "rejected", "temperature", "max-tokens", "system"];
const N_LIKELIEST = 5; // tokens of the target whose probabilities a replay has

let turns = [];
let isUnknown = false; // whether the model is not loaded yet
let nContext = null; // the most tokens of a prompt and its answer, if known
let running = null; // the AbortController of the answer that is coming

part("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    part("composer").requestSubmit();
  }
});
// A setting that is out of range can be shown only if it is not folded away.
part("composer").addEventListener(
  "invalid",
  (event) => event.target.closest("details")?.setAttribute("open", ""),
  { capture: true },
);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.abort();
  }
});
part("stop").addEventListener("click", () => running?.abort());
part("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  keepTurns();
  conversation.querySelectorAll(".turn").forEach((element) => element.remove());
  question.focus();
});
for (const name of ["colours", "rejected"]) {
  part(name).addEventListener("change", () => following(showColours));
}
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    question.value = example.textContent.replace(/\s+/g, " ").trim();
    part("composer").requestSubmit();
  });
}
part("composer").addEventListener("change", keepSettings);
conversation.addEventListener("click", (event) => {
  const button = event.target.closest(".copy");
  if (button !== null) {
    copyFrom(button);
  }
});
addEventListener("pagehide", () => {
  running?.abort(); // the browser would, and that would look like an error
  keepTurns();
});
document.addEventListener("visibilitychange", keepTurns); // phones end hidden pages without a word

fillLegend(document.querySelector(".legend"));
part("model").addEventListener("change", () => {
  keepSettings();
  introduce();
});
restore();
chooseModel();

// Show the settings and the conversation that were kept.
function restore() {
  const settings = kept("settings") ?? {};
  for (const name of SETTINGS.filter((name) => name in settings)) {
    part(name)[valueOf(name)] = settings[name];
  }
  showColours();
  try {
    (kept("turns") ?? []).forEach((saved) => append(Turn.restored(saved, following)));
  } catch (error) { // another version of this page kept them
    console.warn(error);
  }
  if (turns.length) { // what an empty page says is read from its beginning
    conversation.scrollTop = conversation.scrollHeight;
  }
}

function keepSettings() {
  keep("settings", Object.fromEntries(SETTINGS.map((name) => [name, part(name)[valueOf(name)]])));
}

function keepTurns() {
  keep("turns", turns.map((turn) => turn.saved()));
}

// The property of a setting that has its value.
function valueOf(name) {
  return part(name).type === "checkbox" ? "checked" : "value";
}

// Whether tokens have colours, and whether rejected ones are shown.
function showColours() {
  document.body.classList.toggle("colours", part("colours").checked);
  document.body.classList.toggle("shows-rejected", part("colours").checked && part("rejected").checked);
  part("rejected").disabled = !part("colours").checked;
}

// Save a file on the user's disk.
function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Copy a block of code or a whole answer, whatever the button stands at.
async function copyFrom(button) {
  const label = button.textContent;
  const code = button.parentElement.querySelector("pre");
  const text = code?.textContent ?? turns.find((turn) => turn.element.contains(button)).text;
  await copy(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), COPIED_MS);
}

// Offer the models, if there are several.
async function chooseModel() {
  try {
    const models = await client.models();
    part("model").replaceChildren(...models.map((model) => new Option(model)));
    part("model").hidden = models.length === 1;
    part("model").value = models.includes(kept("settings")?.model) ? kept("settings").model : models[0];
    await introduce();
  } catch (error) {
    notice(sentence(error));
  }
}

// Say which model answers. One that is not loaded tells nothing of itself.
async function introduce() {
  const model = part("model").value;
  notice("");
  try {
    const about = await client.about(model);
    const { draft = null, has_chat_template = true } = about;
    const drafts = { null: "loaded when it is asked", none: "no drafts", ngram: "drafts from n-grams" }[draft]
      ?? `drafts from ${draft.replace(/\.gguf$/, "")}`;
    part("about").textContent = part("model").hidden ? `${model} · ${drafts}` : drafts;
    document.title = `${model} – specgen`;
    isUnknown = draft === null;
    nContext = about.default_generation_settings?.n_ctx ?? null;
    part("draft").disabled = draft === "none";
    part("draft").checked = draft !== "none" && (kept("settings")?.draft ?? true);
    if (!has_chat_template) {
      notice("This model has no chat template: it continues texts, but cannot chat.");
    }
  } catch (error) {
    notice(sentence(error));
  }
}

function send() {
  const text = question.value.trim();
  if (text === "" || running !== null) {
    return;
  }
  question.value = "";
  ask(text);
}

// Add a turn at the end of the conversation.
function append(turn) {
  turn.onretry = () => takeBack(turn) && ask(turn.question);
  turn.onedit = () => {
    takeBack(turn);
    keepTurns();
    question.value = [turn.question, question.value].filter(Boolean).join("\n\n");
    question.focus();
  };
  turn.onreplay = async () => {
    try {
      save(turn.replay(await (await client.request("page/replay.html")).text()), "specgen-replay.html");
    } catch (error) {
      notice(sentence(error));
    }
  };
  turns.push(turn);
  conversation.append(turn.element);
}

async function ask(text) {
  notice("");
  const turn = new Turn(text, following);
  const messages = [...turns.flatMap((earlier) => earlier.messages()), said("user", text)];
  if (part("system").value.trim() !== "") {
    messages.unshift(said("system", part("system").value));
  }
  append(turn);
  conversation.scrollTop = conversation.scrollHeight;
  const controller = new AbortController();
  setRunning(controller);
  let pausedAt = performance.now();
  try {
    for await (const chunk of client.answer({ messages, return_progress: true, ...settings() }, controller.signal)) {
      following(() => turn.add(chunk));
      if (performance.now() - pausedAt > LONGEST_MS) {
        await pause();
        pausedAt = performance.now();
      }
    }
    if (isUnknown) {
      await introduce();
    }
    following(() => turn.end(nContext));
  } catch (error) {
    following(() => (controller.signal.aborted ? turn.stop() : turn.fail(sentence(error))));
  } finally {
    controller.abort(); // whatever ended it here, the server shall not go on
    if (running === controller) {
      following(() => setRunning(null));
    }
    keepTurns();
  }
}

// Let the browser handle what else there is: keys, clicks, drawing. While chunks come sooner than they
// are shown, it gets no other chance. (A timer would do so only once a second in a hidden tab.)
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

// Remove the last turn.
function takeBack(turn) {
  turns.pop();
  turn.element.remove();
  return true;
}

function settings() {
  const given = { model: part("model").value, speculative: { draft: part("draft").checked, events: true } };
  const temperature = part("temperature").valueAsNumber;
  const maxTokens = part("max-tokens").valueAsNumber;
  if (!Number.isNaN(temperature)) {
    given.temperature = temperature;
  }
  if (!Number.isNaN(maxTokens)) {
    given.max_tokens = maxTokens;
  }
  if (document.body.classList.contains("shows-rejected")) {
    Object.assign(given, { logprobs: true, top_logprobs: N_LIKELIEST });
  }
  return given;
}

function setRunning(controller) {
  running = controller;
  const isRunning = controller !== null;
  const hadFocus = [part("send"), part("stop")].includes(document.activeElement);
  part("send").hidden = isRunning;
  part("stop").hidden = !isRunning;
  if (hadFocus) {
    part(isRunning ? "stop" : "send").focus();
  }
  document.body.classList.toggle("busy", isRunning);
  conversation.ariaBusy = String(isRunning); // screen readers read the answer when it is whole
}

// Change the conversation, and keep its end in view if it was.
function following(change) {
  const { scrollHeight, scrollTop, clientHeight } = conversation;
  const isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
  change();
  if (isAtEnd) {
    conversation.scrollTop = conversation.scrollHeight;
  }
}

function notice(text) {
  part("notice").textContent = text;
  part("notice").hidden = text === "";
}

// What the user is told of an error, in one line.
function sentence(error) {
  if (error instanceof ServerError) {
    const message = error.message.replace(/\s+/g, " ");
    return error.isContextTooSmall ? `${message}: ${TOO_SMALL}` : message;
  }
  console.error(error);
  return "The server sent something that this page does not understand.";
}

function askForKey(isRefused) {
  const dialog = part("key-dialog");
  part("key-why").textContent = isRefused
    ? "The server refused this API key. Enter another:"
    : "The server wants an API key:";
  part("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "use" ? part("key").value : null),
      { once: true },
    );
  });
}
