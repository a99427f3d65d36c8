// The settings: where they are stored, and what requests take from them.

import { loadItem, onItemChange, saveItem } from "./storage.js";
import { message } from "./turn.js";

const elementOf = (name) => document.getElementById(name);
// The numbers in the panel, by the id of their element, and the fields of a request for them.
const NUMBER_FIELDS = {
  temperature: "temperature",
  "top-k": "top_k",
  "top-p": "top_p",
  "min-p": "min_p",
  "repeat-penalty": "repeat_penalty",
  seed: "seed",
  "max-tokens": "max_tokens",
};
// All settings; an element's id is its name in the browser's storage.
const NAMES = ["model", "draft", "colours", "rejected", "system", ...Object.keys(NUMBER_FIELDS)];
// What the server's defaults mean that are not numbers to be typed.
const WORDS = { seed: { [-1]: "random" }, "max-tokens": { [-1]: "no limit" } };
// How many of the likeliest tokens a replay shows with their probabilities.
const N_LIKELIEST = 5;

export function saveSettings() {
  const values = {};
  for (const name of NAMES) {
    const element = elementOf(name);
    values[name] = element[valueProperty(element)];
  }
  saveItem("settings", values);
  showNumberOfSettings();
}

/** Show the settings as they were saved, but for those that the menu of models restores. */
export function restoreSettings() {
  const values = savedSettings();
  for (const name of NAMES) {
    const isOfMenu = name === "model" || name === "draft";
    if (name in values && !isOfMenu) {
      const element = elementOf(name);
      element[valueProperty(element)] = values[name];
    }
  }
  showNumberOfSettings();
}

/** Call `listener` when another tab has changed settings. */
export function onOtherTabsSettings(listener) {
  onItemChange("settings", listener);
}

/** Return a setting as it was last saved; undefined if it never was. */
export function savedSetting(name) {
  return savedSettings()[name];
}

// All settings as they were last saved; an empty object if they never were, or cannot be read.
function savedSettings() {
  const values = loadItem("settings");
  return values instanceof Object ? values : {};
}

function valueProperty(element) {
  return element.type === "checkbox" ? "checked" : "value";
}

/** Show colours and rejected tokens in the whole conversation, or hide them. */
export function applyTokenDisplay() {
  const hasColours = elementOf("colours").checked;
  document.body.classList.toggle("colours", hasColours);
  document.body.classList.toggle("shows-rejected", hasColours && elementOf("rejected").checked);
  elementOf("rejected").disabled = !hasColours;
}

/** Let the user choose drafts if the model has a drafter; otherwise switch them off. */
export function offerDrafts(isAvailable) {
  elementOf("draft").disabled = !isAvailable;
  elementOf("draft").checked = isAvailable && (savedSetting("draft") ?? true);
}

/**
 * Show in empty fields what the server does without them.
 *
 * @param {Object<string, number>} defaults - by the names of a request's fields
 */
export function showDefaults(defaults) {
  for (const [name, field] of Object.entries(NUMBER_FIELDS)) {
    const value = defaults[field] ?? "auto";
    elementOf(name).placeholder = WORDS[name]?.[value] ?? value;
  }
}

/** Return the settings as fields of a request. */
export function requestFields() {
  const fields = {
    model: elementOf("model").value,
    speculative: { draft: elementOf("draft").checked, events: true },
  };
  for (const [name, field] of Object.entries(NUMBER_FIELDS)) {
    const value = elementOf(name).valueAsNumber;
    if (!Number.isNaN(value)) {
      fields[field] = value;
    }
  }
  if (document.body.classList.contains("shows-rejected")) {
    fields.logprobs = true;
    fields.top_logprobs = N_LIKELIEST;
  }
  return fields;
}

/** Return the maximum length of an answer in tokens; null if the server decides. */
export function maxTokens() {
  return requestFields().max_tokens ?? null;
}

/**
 * Return the messages of a request, which begin with the system prompt if there is one.
 *
 * @param {object[]} messages - the conversation
 */
export function withSystemPrompt(messages) {
  const prompt = systemPrompt();
  return prompt === null ? messages : [message("system", prompt), ...messages];
}

// The system prompt as written; null if it is blank.
function systemPrompt() {
  const text = elementOf("system").value;
  return text.trim() === "" ? null : text;
}

/** Let the server decide all numbers again. */
export function resetNumbers() {
  for (const name of Object.keys(NUMBER_FIELDS)) {
    elementOf(name).value = "";
  }
}

// A setting that somebody has forgotten would be hard to find otherwise.
function showNumberOfSettings() {
  const numbers = Object.keys(NUMBER_FIELDS).filter((name) => elementOf(name).value !== "");
  const nChanged = numbers.length + (systemPrompt() === null ? 0 : 1);
  elementOf("open-settings").textContent = nChanged === 0 ? "Settings" : `Settings (${nChanged})`;
}
