// Copy a text. Browsers give pages their clipboard only over HTTPS and on the loopback; elsewhere the
// text is copied from a text field.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}
