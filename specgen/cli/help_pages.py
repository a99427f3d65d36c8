"""The help of a command: its usual options or all of them, and examples, as plain text."""

from __future__ import annotations

import re
from typing import Any

_EXAMPLES = """
specgen run "Why is the sky blue?"
specgen run -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "Tell a story"
git diff | specgen run -m coder.gguf "Review this change"
specgen chat -m model.gguf --system "Be brief." --file notes.txt
specgen chat -m model.gguf --session work
specgen fim src/shapes.py:120:9 -m coder.gguf --in-place
specgen fim --prefix-file before --suffix-file after -m coder.gguf
specgen batch questions.jsonl answers.jsonl -m model.gguf --parallel 8
specgen serve -m model.gguf --port 8081 --parallel 2
specgen serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt
specgen verify -m model.gguf -md small.gguf
specgen tune -m model.gguf -md small.gguf
specgen bench -m model.gguf "Write a sort function" "Explain gravity"
specgen bench -m model.gguf -md small.gguf --prompts mine.jsonl --json report.json
specgen race -m model.gguf -md small.gguf "Write a sort function"
specgen race --svg race.svg --html race.html "Why is the sky blue?"
specgen config -m model.gguf
specgen worker --host 0.0.0.0 --insecure-network
specgen doctor -m model.gguf
specgen models list --json
specgen models show qwen2.5-coder-1.5b
specgen models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M
ls -l $(specgen models path qwen2.5-coder-1.5b)
specgen models rm Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M
specgen models quantize 0.5b-Q4_K_M.gguf 0.5b-Q4_0.gguf
specgen models clear
specgen draft find -m model.gguf small.gguf smaller.gguf --save
specgen draft make -m model.gguf --minutes 60
specgen draft make -m model.gguf --kind distilled -md small.gguf
specgen draft data -m model.gguf --tokens 80000
specgen draft learn -m model.gguf --minutes 30
specgen draft forget -m model.gguf
"""

#: Beginnings of the headings that commands share. Under these, the short help shows common options
#: only; under other headings, which only one command has, it shows all.
_SHARED_HEADINGS = re.compile(
    "Models|Answer|Constrained|Prompt|Drafting|Repetitions|Other texts|Sampling|Machine|Learning"
    "|Output|Server|Limits"
)
#: The common options, by their readable spellings.
_COMMON_OPTIONS = re.compile(
    "--(target|draft|max-tokens|temp|seed|ctx-size|threads|gpu-layers|policy|system|prompt|file"
    "|json-schema|show|stats|json|port|host)"
)
#: The help of a command with at most this many options always shows all of them.
_MAX_OPTIONS_SHOWN = 20
#: The default at the end of an option's help: words in parentheses, or a value. A range may follow.
_DEFAULT = re.compile(r"default: (?:\((?P<words>.*)\)|(?P<value>[^;\]]*))[^()]*$", re.DOTALL)
#: The maximum width of the column with the options' names.
_MAX_NAMES_WIDTH = 26


def examples(command: str) -> list[str]:
    """Return the examples of a command, by the last word of its name, which is unique."""
    call = re.compile(rf"\bspecgen (?:models |draft )?{command}\b")
    return [line for line in _EXAMPLES.splitlines() if call.search(line)]


def write_options(
    command: Any,
    context: Any,
    formatter: Any,
    *,
    shows_all: bool,
) -> None:
    """Write the options of a command into its help.

    Args:
        command: Typer's command.
        context: Its context.
        formatter: Typer's formatter of the help.
        shows_all: Whether to write all options with all of their text, under their headings.
            Otherwise the common ones are written, with the first sentence of each.
    """
    options = [
        option
        for option in command.get_params(context)
        if "--help" not in option.opts and not option.hidden
    ]
    shows_all |= len(options) <= _MAX_OPTIONS_SHOWN
    sections: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        heading = option.rich_help_panel or "Options"
        if shows_all:
            sections.setdefault(heading, []).append(_full_row(option, context))
        elif _is_common(option, heading):
            sections.setdefault("Options", []).append(_short_row(option, context))
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl(rows, col_max=_MAX_NAMES_WIDTH)
    if not shows_all:
        formatter.write_paragraph()
        note = f"`{context.command_path} --help-all` shows all {len(options)} options."
        formatter.write_text(note)


def write_examples(command: str, formatter: Any) -> None:
    """Write the examples of a command, unwrapped so that they can be copied."""
    with formatter.section("Examples"):
        for line in examples(command):
            formatter.write(f"  {line}\n")


def _is_common(option: Any, heading: str) -> bool:
    """Return whether the short help has an option."""
    if _is_argument(option) or not _SHARED_HEADINGS.match(heading):
        return True
    return _COMMON_OPTIONS.fullmatch(option.opts[0]) is not None


def _full_row(option: Any, context: Any) -> tuple[str, str]:
    """Return the names and the text of an option, as Typer writes them."""
    names, text = option.get_help_record(context)
    if _is_argument(option):
        return option.metavar, text.removesuffix(".")
    return names, text


def _short_row(option: Any, context: Any) -> tuple[str, str]:
    """Return the first one-letter name and the readable one; the first sentence and the default."""
    if _is_argument(option):
        return _full_row(option, context)
    names = [name for name in option.opts if not name.startswith("--")][:1]  # one of -x, if any
    names.append("/".join([option.opts[0], *option.secondary_opts]))
    text = re.split(r"[.:] ", option.help)[0].removesuffix(".")
    default = _short_default(option, context)
    if default:
        text += f" (default: {default})"
    return f"{', '.join(names)} {option.metavar or ''}".rstrip(), text


def _short_default(option: Any, context: Any) -> str:
    """Return an option's default as Typer shows it, its first clause; "" if it shows none."""
    _, text = option.get_help_record(context)
    shown = _DEFAULT.search(text)
    if shown is None:
        return ""
    return re.split("[,;] ", shown["words"] or shown["value"])[0]


def _is_argument(option: Any) -> bool:
    return bool(option.param_type_name == "argument")
