// What the browser remembers for this server: the conversation and the settings. If its storage is
// full or blocked, they are lost when the page is closed.

// One origin may serve several such pages, each below its own path.
const PREFIX = `specgen ${new URL(".", location).pathname} `;

/** Store a value that JSON can represent. */
export function saveItem(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Full or blocked.
  }
}

/** Return a stored value; null if there is none. */
export function loadItem(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}
