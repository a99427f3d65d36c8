// Shows an answer's Markdown as elements.
//
// Nothing that a model writes may run, load or submit anything: HTML is shown as text, images
// become links, and DOMPurify then removes all but the elements and attributes below.

import { marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const ALLOWED_TAGS = [
  ...["h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote"],
  ...["ul", "ol", "li", "pre", "code", "strong", "em", "del", "a"],
  ...["table", "thead", "tbody", "tr", "th", "td"],
];

const SANITIZER_OPTIONS = {
  ALLOWED_TAGS,
  ALLOWED_ATTR: ["href", "align", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

marked.use({
  breaks: true,
  renderer: { html: htmlAsText, image: imageAsLink, checkbox: checkboxAsText },
});

/**
 * Show an answer's Markdown in an element.
 *
 * Blocks that have not changed since the last call stay, and with them what the user has selected
 * there.
 *
 * @param {Element} element
 * @param {string} text
 * @param {function(DocumentFragment): void} decorate - changes what was rendered before it is shown
 */
export function showMarkdown(element, text, decorate) {
  const fragment = rendered(text);
  decorate(fragment);
  const oldBlocks = [...element.childNodes];
  const newBlocks = [...fragment.childNodes];
  const nSame = countSame(oldBlocks, newBlocks);
  oldBlocks.slice(nSame).forEach((block) => block.remove());
  element.append(...newBlocks.slice(nSame));
}

// Return the number of equal blocks at the beginning.
function countSame(oldBlocks, newBlocks) {
  const firstNew = newBlocks.findIndex((block, index) => !oldBlocks[index]?.isEqualNode(block));
  return firstNew < 0 ? newBlocks.length : firstNew;
}

function rendered(text) {
  let fragment;
  try {
    fragment = DOMPurify.sanitize(marked.parse(text), SANITIZER_OPTIONS);
  } catch {
    // Too much for the parser, such as thousands of nested quotations.
    return plainParagraph(text);
  }
  fragment.querySelectorAll("a").forEach(openInNewTab);
  fragment.querySelectorAll("pre").forEach(addCopyButton);
  fragment.querySelectorAll("table").forEach((table) => wrap(table, "wide"));
  return fragment;
}

function plainParagraph(text) {
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  const fragment = document.createDocumentFragment();
  fragment.append(paragraph);
  return fragment;
}

function openInNewTab(link) {
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  if (link.textContent === "") {
    link.remove(); // it was around an image, which is now a link itself
  }
}

function addCopyButton(code) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy code";
  wrap(code, "code").append(button);
}

// Put an element into a new one, which takes its place.
function wrap(element, className) {
  const wrapper = document.createElement("div");
  wrapper.className = className;
  element.replaceWith(wrapper);
  wrapper.append(element);
  return wrapper;
}

function htmlAsText({ text }) {
  const isLineBreak = /^<br\s*\/?>$/i.test(text);
  return isLineBreak ? "<br>" : escaped(text).replace(/\n/g, "<br>");
}

function imageAsLink({ href, text }) {
  const label = `image: ${text || href}`;
  return `<a href="${escaped(href)}">${escaped(label)}</a>`;
}

function checkboxAsText({ checked }) {
  return checked ? "☑ " : "☐ ";
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
