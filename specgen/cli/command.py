"""What all commands have in common: the user's defaults, llama.cpp's spellings, and examples in the help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
import typer.core

from specgen.cli.defaults import defaults_for
from specgen.cli.llama_cpp_options import translated

#: Typer's base of errors in the use of the command line; it has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
#: What the help of a command ends with, by its own name, which no other has.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "run": (
        'specgen run "Why is the sky blue?"',
        'specgen run -hf Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "Tell a story"',
        'git diff | specgen run -m coder.gguf "Review this change"',
    ),
    "chat": (
        'specgen chat -m model.gguf --system "Be brief." --file notes.txt',
        "specgen chat -m model.gguf --session work",
    ),
    "fim": (
        "specgen fim src/shapes.py:120:9 -m coder.gguf --in-place",
        "specgen fim --prefix-file before --suffix-file after -m coder.gguf",
    ),
    "batch": ("specgen batch questions.jsonl answers.jsonl -m model.gguf --parallel 8",),
    "serve": (
        "specgen serve -m model.gguf --port 8081 --parallel 2",
        "specgen serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt",
    ),
    "verify": ("specgen verify -m model.gguf -md small.gguf",),
    "tune": ("specgen tune -m model.gguf -md small.gguf",),
    "bench": (
        'specgen bench -m model.gguf "Write a sort function" "Explain gravity"',
        "specgen bench -m model.gguf -md small.gguf --prompts mine.jsonl --json report.json",
    ),
    "config": ("specgen config -m model.gguf",),
    "worker": (
        "specgen worker --host 0.0.0.0 --insecure-network",
        "specgen run -m model.gguf --rpc 192.0.2.7:50052 Hello",
    ),
    "doctor": ("specgen doctor -m model.gguf",),
    "list": ("specgen models list --json",),
    "show": ("specgen models show qwen2.5-coder-1.5b",),
    "pull": ("specgen models pull Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",),
    "path": ("ls -l $(specgen models path qwen2.5-coder-1.5b)",),
    "rm": ("specgen models rm Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",),
    "find": ("specgen draft find -m model.gguf small.gguf smaller.gguf --save",),
    "make": (
        "specgen draft make -m model.gguf --minutes 60",
        "specgen draft make -m model.gguf --kind distilled -md small.gguf",
    ),
    "data": ("specgen draft data -m model.gguf --tokens 80000",),
    "learn": ("specgen draft learn -m model.gguf --minutes 30",),
    "forget": ("specgen draft forget -m model.gguf",),
}


def without_flag_types(parameters: Any) -> Any:
    """Return options; the help shows no type of flags."""
    for each in parameters:
        if getattr(each, "is_flag", False) or getattr(each, "count", False):
            each.metavar = ""
    return parameters


class Command(typer.core.TyperCommand):
    """A command whose options have the user's defaults."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Typer shows each paragraph as a line.
        self.epilog = "\n\n".join(EXAMPLES.get(self.name or "", ()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = translated(ctx, args)
            try:
                given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except COMMAND_LINE_ERROR as error:
                error.ctx = ctx  # type: ignore[attr-defined]
                raise
            eager = [each.name for each in self.get_params(ctx) if each.is_eager]
            if not any(given.get(name) for name in eager):  # no help is asked for
                ctx.default_map = self._defaults(ctx, given)
        return super().parse_args(ctx, args)

    def _defaults(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the user's defaults. Raise `UsageError` if their file has a mistake."""
        return defaults_for(ctx, given)

    def get_params(self, ctx: Any) -> Any:
        return without_flag_types(super().get_params(ctx))
