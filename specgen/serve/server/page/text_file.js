// Reads files that contain text.

// Larger files hardly fit into any context.
const MAX_BYTES = 8_000_000;
const BYTES_PER_MB = 1_000_000;

/** A file that cannot be given to the model. Its message is a sentence for the user. */
export class FileError extends Error {}

/**
 * Return the text of a file.
 *
 * Throws a FileError if the file is too large, empty, unreadable, or not a text.
 *
 * @param {File} file
 */
export async function readTextFile(file) {
  if (file.size > MAX_BYTES) {
    const size = Math.ceil(file.size / BYTES_PER_MB);
    const limit = MAX_BYTES / BYTES_PER_MB;
    throw new FileError(`${file.name} has ${size} MB, and a file may have at most ${limit} MB.`);
  }
  const text = decoded(file.name, await bytesOf(file));
  if (text.trim() === "") {
    throw new FileError(`${file.name} is empty.`);
  }
  return text.replace(/\r\n?/g, "\n");
}

async function bytesOf(file) {
  try {
    return new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new FileError(`${file.name} cannot be read: it may be a folder, or gone.`);
  }
}

function decoded(name, bytes) {
  let text;
  try {
    text = new TextDecoder(encodingOf(bytes), { fatal: true }).decode(bytes);
  } catch {
    throw notText(name);
  }
  if (text.includes("\0")) {
    throw notText(name);
  }
  return text;
}

// The encoding that a byte order mark tells, else UTF-8.
function encodingOf([first, second]) {
  if (first === 0xff && second === 0xfe) {
    return "utf-16le";
  }
  return first === 0xfe && second === 0xff ? "utf-16be" : "utf-8";
}

function notText(name) {
  return new FileError(`${name} is not a text file: only text (UTF-8) can be attached.`);
}
