// Shows an answer's Markdown as elements.
//
// Nothing that a model writes may run, load or submit anything: HTML is shown as text, images
// become links, and DOMPurify then removes all but the elements and attributes below.

import { codeBlockHtml, frameCodeBlock } from "./code_blocks.js";
import { formulaExtensions, showFormulas } from "./formulas.js";
import { escaped } from "./html_escape.js";
import { marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const ALLOWED_TAGS = [
  ...["h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote"],
  ...["ul", "ol", "li", "pre", "code", "span", "var", "strong", "em", "del", "a"],
  ...["table", "thead", "tbody", "tr", "th", "td"],
];

const SANITIZER_OPTIONS = {
  ALLOWED_TAGS,
  ALLOWED_ATTR: ["href", "align", "start", "class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

marked.use({
  breaks: true,
  extensions: formulaExtensions,
  renderer: {
    html: htmlAsText,
    image: imageAsLink,
    checkbox: checkboxAsText,
    code: codeBlockHtml,
  },
});

/**
 * Show an answer's Markdown in an element.
 *
 * What has not changed since the last call stays, and with it what the user has selected there.
 *
 * @param {Element} element
 * @param {string} text
 * @param {function(DocumentFragment): void} decorate - changes what was rendered before it is shown
 */
export function showMarkdown(element, text, decorate) {
  const fragment = rendered(text);
  decorate(fragment);
  showFormulas(fragment);
  update(element, fragment);
}

// Give an element the children of another one. Equal ones stay, and elements that differ only in
// their children are updated in the same way, such as the paragraph or code block that grows.
function update(element, newElement) {
  const oldNodes = [...element.childNodes];
  const newNodes = [...newElement.childNodes];
  let nKept = 0;
  while (canKeep(oldNodes[nKept], newNodes[nKept])) {
    nKept += 1;
  }
  oldNodes.slice(nKept).forEach((node) => node.remove());
  element.append(...newNodes.slice(nKept));
}

// Whether a node can stay in place of a new one; if so, it is made equal.
function canKeep(node, newNode) {
  if (node === undefined || newNode === undefined) {
    return false;
  }
  if (node.isEqualNode(newNode)) {
    return true;
  }
  if (!haveSameTag(node, newNode)) {
    return false;
  }
  update(node, newNode);
  return true;
}

// Whether two nodes are elements that differ at most in their children.
function haveSameTag(oldNode, newNode) {
  if (!(oldNode instanceof Element && newNode instanceof Element)) {
    return false;
  }
  return oldNode.cloneNode(false).isEqualNode(newNode.cloneNode(false));
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
  fragment.querySelectorAll("pre").forEach(frameCodeBlock);
  fragment.querySelectorAll("table").forEach(frameTable);
  fragment.querySelectorAll("ul, ol").forEach((list) => {
    list.dir = "auto";
  });
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

// Put a table into a frame, in which it scrolls if it is wide.
function frameTable(table) {
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.tabIndex = 0; // Safari scrolls only this way with the keyboard
  table.replaceWith(frame);
  frame.append(table);
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
