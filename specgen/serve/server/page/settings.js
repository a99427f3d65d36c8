// The settings below the question: where they are stored, and what requests take from them.

import { loadItem, saveItem } from "./storage.js";

const elementOf = (name) => document.getElementById(name);
// All settings; an element's id is its name in the browser's storage.
const NAMES = ["model", "draft", "colours", "rejected", "temperature", "max-tokens", "system"];
// How many of the likeliest tokens a replay shows with their probabilities.
const N_LIKELIEST = 5;

export function saveSettings() {
  const values = {};
  for (const name of NAMES) {
    const element = elementOf(name);
    values[name] = element[valueProperty(element)];
  }
  saveItem("settings", values);
}

export function restoreSettings() {
  const values = loadItem("settings") ?? {};
  for (const name of NAMES) {
    if (name in values) {
      const element = elementOf(name);
      element[valueProperty(element)] = values[name];
    }
  }
}

/** Return a setting as it was last saved; undefined if it never was. */
export function savedSetting(name) {
  return loadItem("settings")?.[name];
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

/** Return the settings as fields of a request. */
export function requestFields() {
  const fields = {
    model: elementOf("model").value,
    speculative: { draft: elementOf("draft").checked, events: true },
  };
  const temperature = elementOf("temperature").valueAsNumber;
  if (!Number.isNaN(temperature)) {
    fields.temperature = temperature;
  }
  const maxTokens = elementOf("max-tokens").valueAsNumber;
  if (!Number.isNaN(maxTokens)) {
    fields.max_tokens = maxTokens;
  }
  if (document.body.classList.contains("shows-rejected")) {
    fields.logprobs = true;
    fields.top_logprobs = N_LIKELIEST;
  }
  return fields;
}

/** Return the system prompt as written, or null if it is blank. */
export function systemPrompt() {
  const text = elementOf("system").value;
  return text.trim() === "" ? null : text;
}
