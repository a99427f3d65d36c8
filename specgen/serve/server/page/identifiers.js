const N_BYTES = 12;

/**
 * Return a new random identifier.
 *
 * Browsers have `crypto.randomUUID` only over HTTPS and on the loopback.
 */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(N_BYTES));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
