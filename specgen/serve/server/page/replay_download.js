import { download } from "./download.js";

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
  download(page, "specgen-replay.html", "text/html");
}
