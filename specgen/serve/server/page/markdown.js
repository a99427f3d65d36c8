// An answer's Markdown as elements. What a model says must not run, load or submit anything: HTML in it
// is shown as text, images become links, and DOMPurify then keeps no more than the elements below.

import { marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const POLICY = {
  ALLOWED_TAGS: [
    "h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "pre", "code", "ul", "ol", "li",
    "strong", "em", "del", "a", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "align", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

marked.use({
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text) ? "<br>" : escaped(text).replace(/\n/g, "<br>")),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(`image: ${text || href}`)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Show a text in an element; `mark` changes what was rendered before. Blocks that it shows already stay,
// and with them a selection in these.
export function showMarkdown(element, text, mark) {
  const old = [...element.childNodes];
  const fragment = rendered(text);
  mark(fragment);
  const blocks = [...fragment.childNodes];
  const firstNew = blocks.findIndex((block, number) => !old[number]?.isEqualNode(block));
  const nKept = firstNew < 0 ? blocks.length : firstNew;
  old.slice(nKept).forEach((block) => block.remove());
  element.append(...blocks.slice(nKept));
}

function rendered(text) {
  let fragment;
  try {
    fragment = DOMPurify.sanitize(marked.parse(text), POLICY);
  } catch { // such as quotes in quotes, thousands deep
    return within("p", text);
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    if (link.textContent === "") { // around an image, which is a link itself
      link.remove();
    }
  }
  for (const code of fragment.querySelectorAll("pre")) {
    const copy = Object.assign(document.createElement("button"), { type: "button", className: "copy" });
    copy.textContent = "Copy code";
    enclose(code, "code").append(copy);
  }
  for (const table of fragment.querySelectorAll("table")) {
    enclose(table, "wide");
  }
  return fragment;
}

function enclose(element, className) {
  const around = Object.assign(document.createElement("div"), { className });
  element.replaceWith(around);
  around.append(element);
  return around;
}

function within(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  const fragment = document.createDocumentFragment();
  fragment.append(element);
  return fragment;
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
