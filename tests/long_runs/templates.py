"""How specgen reads the calls and the thoughts of every chat template that llama.cpp ships, a line for each::

    python -m tests.long_runs.templates [FOLDER]

FOLDER is llama.cpp's `models/templates`; without one, the source of the installed llama-cpp-python is fetched. Fails
if a template has lost its form: all that write calls have one, but for those in `UNREAD`.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts import build_peers
from specgen.errors import PromptError
from specgen.serve.formats.call_forms import form_of
from specgen.session.prompts.template import Message, render
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS, ThoughtReader

#: Templates whose calls are not read, and why.
UNREAD = {
    "MiniMax-M3": "writes lists and objects as nested tags",
    "meetkai-functionary-medium-v3.2": "the prompt has the mark of calls, also before other answers",
    "muse-glimmer": "names the function in the head of the turn, and again in the call",
}
#: Control tokens of models whose template offers tools and writes no call.
_TOKENS = ("<|tool_call_start|>", "<|tool_call|>")


def about(name: str, template: str) -> tuple[str, bool]:
    """What is read, and whether that is as expected."""
    lowered = name.lower()
    own = {_TOKENS[0]} if "lfm2" in lowered else {_TOKENS[1]} if "granite-3" in lowered else set()
    form = form_of(template, own.__contains__)
    has_tools = re.search(r"\btools\b", template) is not None
    if form is not None:
        calls = f"{form.style}{' in an object' if form.keys else ''}, {form.mark or 'bare'}"
    else:
        calls = UNREAD.get(name, "unknown form") if has_tools else "takes no tools"
    thoughts = next((mark for mark in THOUGHT_CONTROLS if mark in template), "none")
    try:
        turns = [Message("user", "hello")]
        now = datetime.datetime(2026, 1, 1)
        prompt = render(template, turns, bos_token="", eos_token="", now=now)
        thoughts += ", begun by the template" if ThoughtReader(prompt).is_open else ""
    except PromptError as error:
        return f"calls: {calls}; {error.message}", name in UNREAD
    return (
        f"calls: {calls}; thoughts: {thoughts}",
        form is not None or not has_tools or name in UNREAD,
    )


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as work:
        if arguments:
            folder = Path(arguments[0])
        else:
            source = build_peers.fetch(build_peers.installed_version(), Path(work))
            folder = source / "vendor/llama.cpp/models/templates"
        failed = []
        for file in sorted(folder.glob("*.jinja")):
            line, is_expected = about(file.stem, file.read_text(encoding="utf-8"))
            print(f"{file.stem}: {line}")
            failed += [] if is_expected else [file.stem]
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
