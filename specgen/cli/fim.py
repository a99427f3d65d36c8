"""``specgen fim``: fill a gap in a file, or between two texts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags import argument, option
from specgen.cli.inputs import STDIO, read_text
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Interrupt, Output, show_answer
from specgen.errors import OutputError, PromptError, UsageError

if TYPE_CHECKING:
    from specgen.session.prompts import Prompt
    from specgen.session.prompts.infill import Gap
    from specgen.session.session import Session

#: FILE:LINE or FILE:LINE:COLUMN; a file's name may have colons too.
_LOCATION = re.compile(r"(?P<file>.+?):(?P<line>\d{1,9})(?::(?P<column>\d{1,9}))?", re.DOTALL)
#: How long the prefill of a prompt may take by default.
_PREFILL_S = 5.0
#: The tokens of a prompt that are read even if they take longer; limits are multiples of it.
_LEAST_PREFILL_TOKENS = 256

_gap = partial(option, panel="Gap")


@flags.takes_options
def fim(
    *,
    prefix_file: Path | None = _gap(
        None, "--prefix-file", "A file with the text before the gap; - is standard input."
    ),
    suffix_file: Path | None = _gap(
        None, "--suffix-file", "A file with the text after the gap; - is standard input."
    ),
    context_files: list[Path] | None = _gap(
        None,
        "--context-file",
        "Another file of the project, as context for the model; may be repeated.",
        show_default="none",
    ),
    in_place: bool = _gap(False, "--in-place -i", "Also write the middle into FILE."),
    place: str | None = argument(
        "FILE:LINE[:COLUMN]",
        "Where the gap is: before this column, or at the end of the line; both count from 1, in "
        "characters.",
    ),
    setup: Setup = flags.setup.without("--chat-template", "--chat-template-kwargs").with_default(
        "--max-tokens", 256
    ),
    output: Output = flags.output.with_default("--newline", False),
) -> int:
    """Fill a gap in a file, or between two texts, and print the middle.

    The model must be trained for fill-in-the-middle, like Qwen2.5-Coder, StarCoder2 and Codestral.
    Drafts also come from repetitions of the text around the gap, and of other files of the project.
    """
    setup = replace(setup, answer=output.needs(setup.answer))
    found = _find_gap(place, prefix_file, suffix_file, in_place=in_place)
    context = {str(path): read_text(path) for path in context_files or ()}
    if not found.prefix and not found.suffix and not context:
        raise PromptError("there is no text before or after the gap", hint="give some text")
    from specgen.session.prompts.infill import ContextFile, Gap, check_infill

    gap = Gap(
        _unix(found.prefix),
        _unix(found.suffix),
        name="file" if found.path is None else str(found.path),
        context=tuple(ContextFile(name, _unix(text)) for name, text in context.items()),
        repository=Path.cwd().name or "repository",
    )
    wanted = setup.wanted_session(quiet=output.quiet)
    with opened(
        wanted,
        setup.machine.kernels,
        output,
        check=lambda session: check_infill(session.target),
    ) as session:
        prompt, left_out = _prompt(session, gap)
        if left_out:
            output.note(left_out)
        code, finished = show_answer(session, prompt, output)
    if in_place and not code and finished is not None:
        found.write(finished.text)
        if finished.finish_reason != "stop":
            output.note(f"the middle was cut off after {finished.n_tokens} tokens")
    return code


def _unix(text: str) -> str:
    """Return a text with the line ends that models know."""
    return text.replace("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class _FileGap:
    """A gap between two texts, which may be those of a file."""

    prefix: str
    suffix: str
    path: Path | None = None
    #: The file's byte order mark, if it has one.
    mark: str = ""

    def write(self, middle: str) -> None:
        """Write the file with the middle in it, with the file's line ends.

        Raises:
            OutputError: The file cannot be written, or changed meanwhile.
        """
        from specgen.system.files import replace_bytes, write_errors

        assert self.path is not None
        before = self.mark + self.prefix
        if "\r\n" in self.prefix + self.suffix:
            middle = re.sub("\r?\n", "\r\n", middle)
        with write_errors(self.path):
            if self.path.read_bytes() != (before + self.suffix).encode():
                what = "the file has changed meanwhile; the middle was not written into it"
                raise OutputError(f"{self.path}: {what}")
            replace_bytes(self.path, (before + middle + self.suffix).encode("utf-8", "replace"))


def _find_gap(
    place: str | None, prefix_file: Path | None, suffix_file: Path | None, *, in_place: bool
) -> _FileGap:
    has_files = prefix_file is not None or suffix_file is not None
    if place is not None:
        if has_files:
            raise UsageError("FILE:LINE and --prefix-file or --suffix-file exclude each other")
        return _in_file(place)
    if in_place:
        raise UsageError("--in-place needs FILE:LINE, the file to write to")
    if not has_files:
        hint = "give FILE:LINE[:COLUMN], or --prefix-file and --suffix-file"
        raise UsageError("no gap is given", hint)
    if prefix_file == suffix_file == STDIO:
        raise UsageError("--prefix-file and --suffix-file cannot both be standard input")
    path = None if prefix_file == STDIO else prefix_file
    return _FileGap(read_text(prefix_file), read_text(suffix_file), path)


def _in_file(place: str) -> _FileGap:
    found = _LOCATION.fullmatch(place)
    if found is None:
        hint = "give FILE:LINE or FILE:LINE:COLUMN"
        raise UsageError(f"{place!r} is not a place in a file", hint)
    path = Path(found["file"])
    with_mark = read_text(path, with_mark=True)
    text = with_mark.removeprefix("\ufeff")
    lines = text.split("\n")
    number = int(found["line"])
    if not 1 <= number <= len(lines):
        raise PromptError(f"{path} has no line {number}: it has {len(lines)} lines")
    n_characters = len(lines[number - 1].removesuffix("\r"))
    column = n_characters + 1 if found["column"] is None else int(found["column"])
    if not 1 <= column <= n_characters + 1:
        what = f"line {number} has no column {column}: it has {n_characters} characters"
        raise PromptError(f"{path}: {what}")
    start = sum(len(line) + 1 for line in lines[: number - 1]) + column - 1
    return _FileGap(text[:start], text[start:], path, mark=with_mark.removesuffix(text))


def _prompt(session: Session, gap: Gap) -> tuple[Prompt, str]:
    """Return the prompt for a gap, and a sentence on what is left out of it, if anything is.

    It leaves room for the middle. Unless the user gave the context's size, it is also no longer
    than this machine reads in a few seconds.
    """
    from specgen.session.prompts.infill import infill_prompt

    n_ctx = session.usual_n_ctx
    max_tokens = session.options.generation.max_tokens
    n_room = n_ctx - (max_tokens if max_tokens >= 0 else n_ctx // 4)
    if n_room < n_ctx // 4:
        left = f"{max(0, n_room)} of {n_ctx} tokens for the text around the gap"
        hint = f"use --ctx-size {2 * max_tokens} or more, or a smaller --max-tokens"
        raise UsageError(f"--max-tokens {max_tokens} leaves {left}", hint)
    prompt, left_out = infill_prompt(session.target, session.own_vocabulary, gap, n_room)
    why = f"the context has room for {n_room} tokens of text (raise -c)"
    n_tokens = len(prompt.tokens)
    if session.options.target_context.n_ctx is None and n_tokens > _LEAST_PREFILL_TOKENS:
        n_fast = _fast_prefill_tokens(session)
        if n_fast < n_tokens:
            prompt, left_out = infill_prompt(session.target, session.own_vocabulary, gap, n_fast)
            about = f"{n_fast} tokens in about {_PREFILL_S:.0f} s"
            why = f"this machine reads {about} (-c {n_ctx} reads more)"
    if not left_out:
        return prompt, ""
    return prompt, f"{why}; not read: {', '.join(left_out)}"


def _fast_prefill_tokens(session: Session) -> int:
    """Return how many tokens of a prompt the target reads in a few seconds, as measured."""
    from specgen.session.calibration import target_costs

    with Interrupt() as stop:
        costs = target_costs(session, stop)
    n_rows = max(costs.known)
    n_tokens = int(_PREFILL_S * n_rows / costs.seconds(n_rows))
    return max(1, n_tokens // _LEAST_PREFILL_TOKENS) * _LEAST_PREFILL_TOKENS
