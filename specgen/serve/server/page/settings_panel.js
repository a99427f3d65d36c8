// The panel with the system prompt and the samplers.

import { resetNumbers, restoreSettings, saveSettings } from "./settings.js";

const panel = document.getElementById("settings-panel");
const form = panel.querySelector("form");

/** Let the button open the panel. */
export function listenToPanel() {
  document.getElementById("open-settings").addEventListener("click", () => panel.showModal());
  document.getElementById("reset-settings").addEventListener("click", () => {
    resetNumbers();
    saveSettings();
  });
  // A value that is not valid is not stored, and gone when the panel is closed by Escape: the last
  // valid one takes its place, if there is one.
  panel.addEventListener("change", () => {
    if (form.checkValidity()) {
      saveSettings();
    }
  });
  panel.addEventListener("close", () => {
    for (const field of form.querySelectorAll("input:invalid")) {
      field.value = "";
    }
    restoreSettings();
  });
}
