/**
 * Copy a text to the clipboard.
 *
 * Browsers offer the clipboard's interface only over HTTPS and on the loopback; elsewhere the text
 * is copied from a text field.
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyFromTextField(text);
  }
}

function copyFromTextField(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused.focus({ preventScroll: true });
}
