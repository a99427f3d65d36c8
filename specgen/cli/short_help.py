"""The help of `-h`: three examples and the usual options of a command, on one screen."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

#: By command.
EXAMPLES: Mapping[str, tuple[str, str, str]] = {
    "run": (
        'specgen run "Why is the sky blue?"',
        'specgen run -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "Tell a story"',
        'git diff | specgen run -m coder.gguf "Review this change"',
    ),
    "chat": (
        "specgen chat -m model.gguf",
        'specgen chat -m model.gguf --system "Be brief." --file notes.txt',
        "specgen chat -m model.gguf --session work",
    ),
    "fim": (
        "specgen fim src/shapes.py:120 -m coder.gguf",
        "specgen fim src/shapes.py:120:9 -m coder.gguf --in-place",
        "specgen fim --prefix-file before --suffix-file after -m coder.gguf",
    ),
    "batch": (
        "specgen batch questions.jsonl answers.jsonl -m model.gguf",
        "specgen batch questions.jsonl answers.jsonl -m model.gguf --parallel 8",
        "specgen batch questions.jsonl - -m model.gguf --temp 0.7",
    ),
    "serve": (
        "specgen serve -m model.gguf",
        "specgen serve -m model.gguf --port 8081 --parallel 2",
        "specgen serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt",
    ),
    "verify": (
        "specgen verify",
        "specgen verify -m model.gguf -md small.gguf",
        "specgen verify -m model.gguf --draft ngram",
    ),
    "tune": (
        "specgen tune",
        "specgen tune -m model.gguf -md small.gguf",
        "specgen tune -m model.gguf --prompts mine.jsonl --count 8",
    ),
    "bench": (
        'specgen bench -m model.gguf "Write a sort function" "Explain gravity"',
        "specgen bench -m model.gguf --draft ngram --prompts mine.jsonl",
        "specgen bench -m model.gguf -md small.gguf --html report.html",
    ),
    "config": (
        "specgen config",
        "specgen config -m model.gguf",
        "specgen config > defaults.txt",
    ),
    "worker": (
        "specgen worker",
        "specgen worker --host 0.0.0.0 --port 50052",
        "specgen run -m model.gguf --rpc 192.0.2.7:50052 Hello",
    ),
    "doctor": (
        "specgen doctor",
        "specgen doctor -m model.gguf",
        "specgen doctor --json",
    ),
    "models list": (
        "specgen models list",
        "specgen models list --json",
        "specgen models show qwen2.5-coder-1.5b",
    ),
    "models show": (
        "specgen models show qwen2.5-coder-1.5b",
        "specgen models show qwen2.5-coder-1.5b --json",
        "specgen models list",
    ),
    "models pull": (
        "specgen models pull qwen2.5-coder-1.5b",
        "specgen models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
        "specgen run -m qwen2.5-coder-1.5b Hello",
    ),
    "models rm": (
        "specgen models rm qwen2.5-coder-smollm2",
        "specgen models rm Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
        "specgen models rm qwen2.5-coder-1.5b --yes",
    ),
    "models path": (
        "specgen models path qwen2.5-coder-1.5b",
        "specgen models path qwen2.5-coder-smollm2",
        "ls -l $(specgen models path qwen2.5-coder-1.5b)",
    ),
    "draft find": (
        "specgen draft find -m model.gguf folder",
        "specgen draft find -m model.gguf small.gguf smaller.gguf --save",
        "specgen draft find -m model.gguf --prompts mine.jsonl",
    ),
    "draft make": (
        "specgen draft make -m model.gguf",
        "specgen draft make -m model.gguf --minutes 60",
        "specgen draft make -m model.gguf --kind distilled -md small.gguf",
    ),
    "draft data": (
        "specgen draft data -m model.gguf",
        "specgen draft data -m model.gguf --tokens 80000",
        "specgen draft data -m model.gguf --prompts mine.jsonl",
    ),
    "draft learn": (
        "specgen draft learn -m model.gguf",
        "specgen draft learn -m model.gguf --minutes 30",
        "specgen chat -m model.gguf --learn",
    ),
    "draft forget": (
        "specgen draft forget -m model.gguf",
        "specgen draft forget -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
        "specgen draft learn -m model.gguf",
    ),
}
#: The options that are shown of a command with many.
USUAL = (
    *("--target", "--hf-repo", "--draft", "--pair"),
    *("--prompt", "--file", "--chat", "--system", "--session"),
    *(
        "--prefix-file",
        "--suffix-file",
        "--context-file",
        "--in-place",
        "--prompts",
        "--count",
        "--repeat",
        "--kind",
        "--minutes",
        "--tokens",
    ),
    *(
        "--max-tokens",
        "--stop",
        "--temp",
        "--top-k",
        "--top-p",
        "--seed",
        "--json-schema",
        "--grammar-file",
    ),
    *(
        "--ctx-size",
        "--threads",
        "--gpu-layers",
        "--host",
        "--port",
        "--parallel",
        "--api-key-file",
    ),
    *("--save", "--html", "--stats", "--show", "--json", "--quiet", "--verbose", "--help"),
)
#: A command with no more options than this shows all of them.
_FEW = 22
#: Where a text may end before its end, the best places first.
_ENDS = (re.compile(r"[.;](?: |$)"), re.compile(r" \(|[:,] "))
#: The most columns of an option before its text, unless it is longer itself.
_ALIGNED = 24
#: Columns; a narrower terminal has fewer.
_WIDTH = 100


def short_help(command: Any, context: Any) -> str:
    """Return the text."""
    path = " ".join(context.command_path.split(" ")[1:])
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    does = " ".join((command.help or "").strip().split("\n\n")[0].split())
    examples = [f"  {example}" for example in EXAMPLES.get(path, ())]
    rows = list(_rows(command, context))
    columns = max(60, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))
    width = min(_ALIGNED, max(len(spelling) for spelling, _ in rows))
    options = [
        f"  {spelling:<{width}}  {_beginning(text, columns - max(width, len(spelling)) - 4)}"
        for spelling, text in rows
    ]
    parts = [
        [f"usage: {usage}"],
        textwrap.wrap(does, columns),
        examples,
        options,
        [f"`{context.command_path} --help` explains all options."],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _rows(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    options = [
        each
        for each in command.get_params(context)
        if each.param_type_name == "option" and not each.hidden
    ]
    for each in options:
        if len(options) > _FEW and not {*each.opts} & {*USUAL}:
            continue
        shorts = [name for name in each.opts if not name.startswith("--")][:1]
        longs = [name for name in each.opts if name.startswith("--")][:1]
        spelling = ", ".join([*shorts, *longs])
        if each.secondary_opts:
            spelling += f"/{each.secondary_opts[0]}"
        if not each.is_flag and not getattr(each, "count", False):
            spelling += f" {_value(each.metavar or 'N')}"
        yield spelling, (each.help or "").replace("`", "")


def _beginning(text: str, columns: int) -> str:
    """Return as many clauses of a text as there is room for; if there are none, as many words."""
    for pattern in _ENDS:
        ends = [found.start() for found in pattern.finditer(text) if found.start() <= columns]
        whole = [end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
        if whole:
            return text[: whole[-1]]
    return textwrap.shorten(text, columns, placeholder=" ...")


def _value(metavar: str) -> str:
    """Return the first kind of value, or all words that can be chosen."""
    first = metavar.partition("|")[0]
    return first if first != first.lower() else metavar
