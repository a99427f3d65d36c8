// Code blocks of an answer, with their syntax highlighted.

import { escaped } from "./html_escape.js";
import hljs from "./vendor/highlight.min.js";

// What a language is called in the class of a code element.
const LANGUAGE_CLASS = /^language-([\w+#.-]{1,20})$/;

/**
 * Return a code block as HTML. An unknown language is not highlighted.
 *
 * @param {{text: string, lang: string|undefined}} token - marked's token
 */
export function codeBlockHtml({ text, lang }) {
  const language = lang?.match(/^\S+/)?.[0] ?? "";
  const code = `${text.replace(/\n$/, "")}\n`;
  const className = escaped(`language-${language}`);
  return `<pre><code class="${className}">${highlighted(code, language)}</code></pre>`;
}

function highlighted(code, language) {
  if (hljs.getLanguage(language) === undefined) {
    return escaped(code);
  }
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/** Put a code block into a frame with the name of its language and a button that copies it. */
export function frameCodeBlock(block) {
  const code = block.querySelector("code");
  const language = code?.className.match(LANGUAGE_CLASS)?.[1];
  code?.removeAttribute("class");
  const frame = document.createElement("div");
  frame.className = "code";
  if (language !== undefined) {
    frame.dataset.language = language;
  }
  block.tabIndex = 0; // Safari scrolls only this way with the keyboard
  block.replaceWith(frame);
  frame.append(block, copyButton());
}

function copyButton() {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy code";
  return button;
}
