"""``specgen fim``: fill a gap in a file, or between two texts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags import argument, option
from specgen.cli.inputs import STDIO, input_name, read_bytes, read_input
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Interrupt, Output, show_answer
from specgen.errors import OutputError, PromptError, UsageError
from specgen.system.files import (
    TextEncoding,
    decode_text,
    encoding_of,
    replace_bytes,
    write_errors,
)
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from specgen.session.prompts import Prompt
    from specgen.session.prompts.infill import Gap
    from specgen.session.session import Session

#: FILE:LINE or FILE:LINE:COLUMN; a file's name may have colons too.
_LOCATION = re.compile(r"(?P<file>.+?):(?P<line>\d{1,9})(?::(?P<column>\d{1,9}))?", re.DOTALL)
#: The time that the prefill of a prompt may take by default.
_MAX_PREFILL_S = 5.0
#: The limit that this sets is a multiple of this number of tokens, and at least this number.
_PREFILL_STEP_TOKENS = 256

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
    context_files: tuple[Path, ...] = _gap(
        (),
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
    setup = replace(setup, answer=output.with_logprobs(setup.answer))
    file_gap = _find_gap(place, prefix_file, suffix_file, in_place=in_place)
    context = {str(path): read_input(path) for path in context_files}
    if not file_gap.prefix and not file_gap.suffix and not context:
        raise PromptError("there is no text before or after the gap", hint="give some text")
    from specgen.session.prompts.infill import ContextFile, Gap, check_infill

    gap = Gap(
        _unix_line_ends(file_gap.prefix),
        _unix_line_ends(file_gap.suffix),
        name="file" if file_gap.path is None else str(file_gap.path),
        context=tuple(ContextFile(name, _unix_line_ends(text)) for name, text in context.items()),
        repository=Path.cwd().name or "repository",
    )
    wanted = setup.wanted_session(quiet=output.quiet)
    with opened(
        wanted,
        setup.machine.kernels,
        output,
        check=lambda session: check_infill(session.target),
    ) as session:
        prompt, note = _prompt(session, gap)
        if note:
            output.note(note)
        code, finished = show_answer(session, prompt, output)
    if in_place and not code and finished is not None:
        file_gap.write(finished.text)
        if finished.finish_reason != "stop":
            output.note(f"the middle was cut off after {finished.n_tokens} tokens")
    return code


def _unix_line_ends(text: str) -> str:
    """Return a text with the line ends that models are trained on."""
    return text.replace("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class _FileGap:
    """A gap between two texts, as they are in the files."""

    #: The text before the gap.
    prefix: str
    #: The text after the gap.
    suffix: str
    #: The file with the gap, or with the text before it; None if there is no such file.
    path: Path | None = None
    #: How the file is encoded.
    encoding: TextEncoding = TextEncoding("utf-8")

    def write(self, middle: str) -> None:
        """Write the middle into the file, with the file's line ends.

        Raises:
            OutputError: If the file cannot be written, or has changed since it was read.
        """
        assert self.path is not None
        if "\r\n" in self.prefix + self.suffix:
            middle = re.sub("\r?\n", "\r\n", middle)
        bytes_as_read = self.encoding.encode(self.prefix + self.suffix)
        new_bytes = self.encoding.encode(self.prefix + middle + self.suffix)
        with write_errors(self.path):
            if self.path.read_bytes() != bytes_as_read:
                what = "the file has changed in the meantime; the middle was not written into it"
                raise OutputError(f"{self.path}: {what}")
            replace_bytes(self.path, new_bytes)


def _find_gap(
    place: str | None,
    prefix_file: Path | None,
    suffix_file: Path | None,
    *,
    in_place: bool,
) -> _FileGap:
    """Return the gap that the command line describes, with the texts around it.

    Raises:
        UsageError: If no gap is described, or options conflict.
        PromptError: If a file cannot be read, or has no such line or column.
    """
    has_files = prefix_file is not None or suffix_file is not None
    if place is not None:
        if has_files:
            raise UsageError("FILE:LINE and --prefix-file or --suffix-file cannot be used together")
        return _gap_at(place)
    if in_place:
        raise UsageError("--in-place needs FILE:LINE, the file to write to")
    if not has_files:
        hint = "give FILE:LINE[:COLUMN], or --prefix-file and --suffix-file"
        raise UsageError("no gap is given", hint)
    if prefix_file == suffix_file == STDIO:
        raise UsageError("--prefix-file and --suffix-file cannot both be standard input")
    path = None if prefix_file == STDIO else prefix_file
    return _FileGap(read_input(prefix_file), read_input(suffix_file), path)


def _gap_at(place: str) -> _FileGap:
    """Return the gap at FILE:LINE (the end of the line) or FILE:LINE:COLUMN."""
    location = _LOCATION.fullmatch(place)
    if location is None:
        hint = "give FILE:LINE or FILE:LINE:COLUMN"
        raise UsageError(f"{place!r} is not a place in a file", hint)
    path = Path(location["file"])
    data = read_bytes(path)
    text = decode_text(data, input_name(path), PromptError)
    lines = text.split("\n")
    line_number = int(location["line"])
    if not 1 <= line_number <= len(lines):
        n_lines = counted(len(lines), "line")
        raise PromptError(f"{path} has no line {line_number}: it has {n_lines}")
    n_characters = len(lines[line_number - 1].removesuffix("\r"))
    column = n_characters + 1  # after the last character
    if location["column"] is not None:
        column = int(location["column"])
    if not 1 <= column <= n_characters + 1:
        length = counted(n_characters, "character")
        raise PromptError(f"{path}: line {line_number} has no column {column}: it has {length}")
    line_start = sum(len(line) + 1 for line in lines[: line_number - 1])
    gap_start = line_start + column - 1
    return _FileGap(text[:gap_start], text[gap_start:], path, encoding_of(data))


def _prompt(session: Session, gap: Gap) -> tuple[Prompt, str]:
    """Return the prompt for a gap, and a note on what is left out of it.

    The prompt leaves room for the middle in the context. Unless the user gave the context's size,
    it is also limited to what this machine prefills in a few seconds.

    Returns:
        The prompt, and the note, which is "" if nothing is left out.

    Raises:
        UsageError: If --max-tokens leaves less than a quarter of the context for the prompt.
    """
    from specgen.session.prompts.infill import infill_prompt

    n_room = _room_for_text(session)
    prompt, left_out = infill_prompt(session.target, session.translated_draft, gap, n_room)
    why = f"the context has room for {n_room} tokens of text (raise -c)"

    # A prompt that takes too long is made again, shorter.
    n_tokens = len(prompt.tokens)
    if session.options.target_context.n_ctx is None and n_tokens > _PREFILL_STEP_TOKENS:
        n_fast = _fast_prefill_tokens(session)
        if n_fast < n_tokens:
            prompt, left_out = infill_prompt(session.target, session.translated_draft, gap, n_fast)
            speed = f"{n_fast} tokens in about {_MAX_PREFILL_S:.0f} s"
            why = f"this machine prefills {speed} (-c {session.usual_n_ctx} allows more)"
    if not left_out:
        return prompt, ""
    return prompt, f"{why}; left out: {', '.join(left_out)}"


def _room_for_text(session: Session) -> int:
    """Return how many tokens of the context are left for the text around the gap.

    Raises:
        UsageError: If --max-tokens leaves less than a quarter of the context.
    """
    n_ctx = session.usual_n_ctx
    max_tokens = session.options.generation.max_tokens
    n_middle = max_tokens
    if max_tokens < 0:  # no limit
        n_middle = n_ctx // 4
    n_room = n_ctx - n_middle
    if n_room < n_ctx // 4:
        room = f"{max(0, n_room)} of {n_ctx} tokens for the text around the gap"
        hint = session.fitting_hint(2 * max_tokens, "a smaller --max-tokens")
        raise UsageError(f"--max-tokens {max_tokens} leaves {room}", hint)
    return n_room


def _fast_prefill_tokens(session: Session) -> int:
    """Return how many prompt tokens the target prefills in `_MAX_PREFILL_S`, as measured."""
    from specgen.session.calibration import target_costs

    with Interrupt() as stop:
        costs = target_costs(session, stop)
    # The largest batch that was measured comes closest to a prefill.
    n_rows = max(costs.known)
    n_tokens = int(_MAX_PREFILL_S * n_rows / costs.seconds(n_rows))
    return max(1, n_tokens // _PREFILL_STEP_TOKENS) * _PREFILL_STEP_TOKENS
