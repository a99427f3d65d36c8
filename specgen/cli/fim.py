"""``specgen fim``: fill a gap in a file, or between two texts."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli import flags
from specgen.cli.flags.subset import without
from specgen.cli.one_answer import show_answer, with_grammar
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.errors import OutputError, PromptError, UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, Grammar, SamplerOptions
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options

if TYPE_CHECKING:
    from specgen.engine.infill import ContextFile, Gap
    from specgen.engine.models import Models
    from specgen.events import FinishedEvent

_GAP = "Gap"
#: FILE:LINE or FILE:LINE:COLUMN; a file's name may have colons too.
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d{1,9})(?::(?P<column>\d{1,9}))?", re.DOTALL)
_BOM = "\ufeff"


@flags.takes_options(
    models=flags.models,
    answer=without(flags.answer, "max_tokens"),
    grammar=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
)
def fim(
    *,
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE:LINE[:COLUMN]",
            help="Where the gap is: before this column, or at the end of the line. Lines and columns (in "
            "characters) count from 1.",
            show_default=False,
        ),
    ] = None,
    prefix_file: Annotated[
        Path | None,
        typer.Option(
            "--prefix-file",
            help="A file with the text before the gap; - is standard input.",
            rich_help_panel=_GAP,
        ),
    ] = None,
    suffix_file: Annotated[
        Path | None,
        typer.Option(
            "--suffix-file",
            help="A file with the text after the gap; - is standard input.",
            rich_help_panel=_GAP,
        ),
    ] = None,
    context_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--context-file",
            help="Another file of the project, as context for the model; may be given several times.",
            show_default="none",
            rich_help_panel=_GAP,
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            "-i",
            help="Also write the middle into FILE.",
            rich_help_panel=_GAP,
        ),
    ] = False,
    models: ModelChoice,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            "--predict",
            "-n",
            min=-1,
            help="The most tokens to generate; -1 is no limit but the end of the middle or of the "
            "context.",
            rich_help_panel="Answer",
        ),
    ] = 256,
    answer: GenerationOptions,
    grammar: Grammar | None,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    learn: flags.Learn = False,
    show: flags.ShowOption = "accepted",
    stats: flags.Stats = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Fill a gap in a file, or between two texts, and print the middle.

    The model must be trained for fill-in-the-middle, like Qwen2.5-Coder, StarCoder2 and Codestral.
    Repetitions of the text around the gap, and of other files of the project, draft too.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    generation = with_grammar(replace(answer, max_tokens=max_tokens), grammar, json=json)
    from specgen.engine.infill import infill_prompt

    found = _find_place(place, prefix_file, suffix_file, in_place=in_place)
    context = [(str(path), _decode(_read(path), str(path))) for path in context_files or ()]
    if not found.prefix and not found.suffix and not context:
        raise PromptError("there is no text before or after the gap", hint="give some text")
    sources = find_models(models, quiet=quiet)
    options = session_options(sources, sampling, drafting, generation, machine, learn=learn)
    use_kernels(machine.kernels, quiet=quiet)
    finished: list[FinishedEvent] = []
    with (
        log_shown(verbose),
        open_session(options, quiet=quiet, verbose=verbose, drafts=sources.drafts) as loaded,
    ):
        infill = infill_prompt(
            loaded.target, loaded.drafts.own_vocabulary, _gap(found, context), _room(loaded)
        )
        if infill.left_out and not quiet:
            left_out = ", ".join(infill.left_out)
            print(f"note: left out, since the context has no room: {left_out}", file=sys.stderr)
        code = show_answer(
            loaded,
            infill.prompt,
            show=show,
            stats=stats if stats is not None else not (json or quiet),
            json=json,
            quiet=quiet,
            verbose=verbose,
            on_finished=finished.append,
        )
    if in_place and not code:
        found.write(finished[0].text)
        if finished[0].finish_reason != "stop" and not quiet:
            n_tokens = finished[0].n_tokens
            print(f"note: the middle was cut off after {n_tokens} tokens", file=sys.stderr)
    return code


@dataclass(frozen=True, slots=True)
class _Place:
    """A gap between two texts; in the file `path`, if it is in one file."""

    prefix: str
    suffix: str
    path: Path | None = None
    #: The text as it was read, and the part of the file before `prefix`.
    text: str = ""
    begins: str = ""

    def write(self, middle: str) -> None:
        """Write the file with the middle in it, with the file's own line ends. Raises `OutputError`, also if
        the file changed meanwhile."""
        from specgen.atomic import new_beside

        assert self.path is not None
        if "\r\n" in self.text:
            middle = re.sub("\r?\n", "\r\n", middle)
        path = self.path.resolve()  # a link stays a link
        try:
            if path.read_bytes() != self.text.encode():
                raise OutputError(
                    f"{self.path}: the file has changed meanwhile; the middle was not written into it"
                )
            whole = self.begins + self.prefix + middle + self.suffix
            with new_beside(path) as new:
                new.write_bytes(whole.encode("utf-8", "replace"))
                new.chmod(path.stat().st_mode)
                new.replace(path)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error


def _find_place(
    place: str | None, prefix_file: Path | None, suffix_file: Path | None, *, in_place: bool
) -> _Place:
    """Return the gap that was asked for. Raises `UsageError`, `PromptError`."""
    if place is not None and (prefix_file or suffix_file):
        raise UsageError("FILE:LINE and --prefix-file or --suffix-file exclude each other")
    if place is not None:
        return _in_file(place)
    if in_place:
        raise UsageError("--in-place needs FILE:LINE, the file to write to")
    if prefix_file is None and suffix_file is None:
        raise UsageError(
            "no gap is given",
            hint="give FILE:LINE[:COLUMN], or --prefix-file and --suffix-file",
        )
    if str(prefix_file) == str(suffix_file) == "-":
        raise UsageError("--prefix-file and --suffix-file cannot both be standard input")
    prefix, suffix = (
        "" if path is None else _decode(_read(path), _name(path)).removeprefix(_BOM)
        for path in (prefix_file, suffix_file)
    )
    named = prefix_file if prefix_file is not None and str(prefix_file) != "-" else None
    return _Place(prefix, suffix, named)


def _in_file(place: str) -> _Place:
    """Return the gap at FILE:LINE[:COLUMN]. Raises `UsageError` if the text has another form, `PromptError`
    if the file has no such place."""
    found = _PLACE.fullmatch(place)
    if found is None:
        raise UsageError(
            f"{place!r} is not a place in a file", hint="give FILE:LINE or FILE:LINE:COLUMN"
        )
    path, number = Path(found["file"]), int(found["line"])
    text = _decode(_read(path), str(path))
    begins = _BOM if text.startswith(_BOM) else ""
    lines = text.removeprefix(_BOM).split("\n")
    if not 1 <= number <= len(lines):
        raise PromptError(f"{path} has no line {number}: it has {len(lines)} lines")
    line = lines[number - 1].removesuffix("\r")
    column = len(line) + 1 if found["column"] is None else int(found["column"])
    if not 1 <= column <= len(line) + 1:
        raise PromptError(
            f"{path}: line {number} has no column {column}: it has {len(line)} characters"
        )
    start = sum(len(each) + 1 for each in lines[: number - 1]) + column - 1
    rest = text.removeprefix(_BOM)
    return _Place(rest[:start], rest[start:], path, text, begins)


def _gap(place: _Place, context: list[tuple[str, str]]) -> Gap:
    """Return the gap for the model: with line ends of one kind."""
    from specgen.engine.infill import ContextFile, Gap

    files: list[ContextFile] = [
        ContextFile(name, text.removeprefix(_BOM).replace("\r\n", "\n")) for name, text in context
    ]
    return Gap(
        place.prefix.replace("\r\n", "\n"),
        place.suffix.replace("\r\n", "\n"),
        name=str(place.path) if place.path is not None else "file",
        context=tuple(files),
        repository=Path.cwd().name or "repository",
    )


def _room(loaded: Models) -> int:
    """Return the most tokens of the prompt. The far ends of a long file matter little, and take long to read.
    Raises `UsageError` if the middle needs the whole context."""
    n_ctx = loaded.usual_n_ctx
    max_tokens = loaded.options.generation.max_tokens
    n_room = n_ctx - (max_tokens if max_tokens >= 0 else n_ctx // 4)
    if n_room < n_ctx // 4:
        raise UsageError(
            f"--max-tokens {max_tokens} leaves {max(0, n_room)} of {n_ctx} tokens for the text around "
            "the gap",
            hint=f"use --ctx-size {2 * max_tokens} or more, or a smaller --max-tokens",
        )
    return n_room


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise PromptError(
            f"{name} is not UTF-8: byte {data[error.start]:#04x} on line {line}"
        ) from None


def _name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)
