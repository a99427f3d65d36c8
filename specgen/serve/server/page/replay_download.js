/**
 * Save a file in which the answer grows as it did.
 *
 * @param {string} template - the page that replays an answer, without its events
 * @param {object[]} events - the events of the answer
 */
export function downloadReplay(template, events) {
  // Nothing in a script may look like the start of a tag.
  const json = JSON.stringify(events).replaceAll("<", "\\u003c");
  const page = template.replace("DATA_HERE", () => json);
  download(new Blob([page], { type: "text/html" }), "specgen-replay.html");
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
