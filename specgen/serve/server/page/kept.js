// What the browser keeps for the address of this server: the conversation and the settings. If its
// storage is full or blocked, they are forgotten with the page.

const NAME = `specgen ${new URL(".", location).pathname} `;

export function keep(what, value) {
  try {
    localStorage.setItem(NAME + what, JSON.stringify(value));
  } catch {
    // Full or blocked.
  }
}

// What was kept, or null.
export function kept(what) {
  try {
    return JSON.parse(localStorage.getItem(NAME + what));
  } catch {
    return null;
  }
}
