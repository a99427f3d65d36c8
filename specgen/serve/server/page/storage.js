// What the browser remembers for this server outside its database: the settings. If its storage is
// full or blocked, they are lost when the page is closed.

/** The name of what is stored. One origin may serve several such pages, each below its own path. */
export const STORAGE_NAME = `specgen ${new URL(".", location).pathname}`;

/** Store a value that JSON can represent. */
export function saveItem(name, value) {
  try {
    localStorage.setItem(keyOf(name), JSON.stringify(value));
  } catch {
    // Full or blocked.
  }
}

/** Return a stored value; null if there is none. */
export function loadItem(name) {
  try {
    return JSON.parse(localStorage.getItem(keyOf(name)));
  } catch {
    return null;
  }
}

/** Call `listener` when another tab stores a value under this name. */
export function onItemChange(name, listener) {
  addEventListener("storage", ({ key }) => {
    if (key === keyOf(name)) {
      listener();
    }
  });
}

function keyOf(name) {
  return `${STORAGE_NAME} ${name}`;
}
