"""Wrap the paragraphs of Markdown documents at 120 columns.

`--check` only lists the lines that are too long.

A paragraph is rewrapped if one of its lines is too long; all others stay as they are. Tables, code,
headings, HTML and link definitions are left alone. A line is never broken within the target of a
link, nor within code unless that is very long.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 120
#: Code that is longer than this may be broken at its spaces.
LONG_CODE = 80

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_ITEM = re.compile(r"(\s*)((?:[-*+]|\d+[.)])\s+)")
_QUOTE = re.compile(r"\s*>\s?")
#: Lines that stay as they are: tables, headings, rules, HTML, definitions of links and footnotes.
_VERBATIM = re.compile(r"\s*(\||#{1,6}\s|<[!/a-zA-Z]|\[[^\]]+\]:\s|(?:[-*_=]\s*){3,}$)")
#: Words that must not begin a line, because they are markup there.
_MARKER = re.compile(r"(?:[-*+>]|\d+[.)]|#{1,6}|=+|-+)$|\||<[!/a-zA-Z]|`{3}|~{3}")
#: A word, which includes code and the target of a link with the spaces in them.
_WORD = re.compile(r"(?:(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|\]\([^)]*\)|\S)+")


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Wrap Markdown documents at {WIDTH} columns.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="only list the lines that are too long"
    )
    arguments = parser.parse_args()
    problems = [each for path in arguments.files for each in _process(path, arguments.check)]
    if problems:
        sys.exit("\n".join(problems))


def _process(path: Path, check: bool) -> list[str]:
    """Wrap a file, or with `check` return a message for each line that is too long."""
    text = path.read_text(encoding="utf-8")
    if check:
        return [f"{path}:{number}: {len(line)} columns" for number, line in too_long(text)]
    if (new := wrapped(text)) != text:
        path.write_bytes(new.encode())
    return []


def wrapped(text: str) -> str:
    """Return the document with those paragraphs rewrapped that have a line longer than `WIDTH`."""
    return "".join(line + "\n" for block in _blocks(text) for line in block.filled())


def too_long(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line longer than `WIDTH`, without link targets."""
    number = 0
    for block in _blocks(text):
        for line in block.lines:
            number += 1
            if block.is_prose and len(re.sub(r"\]\([^)]*\)", "]()", line)) > WIDTH:
                yield number, line


@dataclass
class _Block:
    """Lines that belong together: a paragraph, an item of a list, or lines that are left alone."""

    is_prose: bool
    #: The prefix of the first line, and that of each other line.
    first: str = ""
    rest: str = ""
    lines: list[str] = field(default_factory=list)

    def filled(self) -> list[str]:
        """Return the lines, rewrapped if one of them is too long."""
        if not self.is_prose or all(len(line) <= WIDTH for line in self.lines):
            return self.lines
        contents = [line.removeprefix(self.rest).strip() for line in self.lines]
        contents[0] = self.lines[0][len(self.first) :].strip()
        end = (
            self.lines[-1][len(self.lines[-1].rstrip()) :] if self.lines[-1].endswith("  ") else ""
        )
        filled: list[str] = []
        line = self.first
        is_empty = True
        for word in _words(" ".join(contents)):
            if not is_empty and len(line) + 1 + len(word) > WIDTH:
                filled.append(line)
                line, is_empty = self.rest, True
            line += word if is_empty else f" {word}"
            is_empty = False
        return [*filled, line + end]


def _words(text: str) -> list[str]:
    words: list[str] = []
    for match in _WORD.finditer(text):
        for word in match[0].split() if len(match[0]) > LONG_CODE else (match[0],):
            if words and _MARKER.match(word):
                words[-1] += f" {word}"
            else:
                words.append(word)
    return words


def _blocks(text: str) -> Iterator[_Block]:
    block = _Block(is_prose=False)
    fence = ""
    is_comment = is_code = False
    for line in text.splitlines():
        opens = _FENCE.match(line)
        # Four spaces make code, except within a list, where they continue an item.
        is_code = line.startswith("    ") and (
            is_code or (not block.rest.strip(">") and _is_gap(block))
        )
        if fence or opens or is_comment or is_code or line.lstrip().startswith("<!--"):
            yield block
            block = _Block(is_prose=False, rest=block.rest, lines=[line])
            if opens and not fence:
                fence = opens[1]
            elif opens and opens[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            is_comment = (
                not fence and (is_comment or line.lstrip().startswith("<!--")) and "-->" not in line
            )
        elif not line.strip() or _VERBATIM.match(line):
            yield block
            rest = block.rest if not line.strip() or line.startswith(" ") else ""
            block = _Block(is_prose=False, rest=rest, lines=[line])
        elif item := _ITEM.match(line):
            yield block
            block = _Block(True, item[0], " " * len(item[0]), [line])
        elif block.is_prose and not block.lines[-1].endswith(("  ", "\\")):
            block.lines.append(line)
        else:
            yield block
            quote = _QUOTE.match(line)
            prefix = quote[0] if quote else line[: len(line) - len(line.lstrip())]
            block = _Block(True, prefix, prefix, [line])
    yield block


def _is_gap(block: _Block) -> bool:
    return not block.is_prose and not "".join(block.lines).strip()


if __name__ == "__main__":
    main()
