r"""The first turns of Spec-Bench's 480 questions: plain decoding and drafts in interleaved runs.

    make spec-bench QUESTIONS=question.jsonl
    python -m benchmarks.spec_bench question.jsonl --bigger bigger.gguf --minutes 60
    python -m benchmarks.spec_bench question.jsonl --other before=../specgen-before \
        --settings ngram smollm2-135m --output benchmarks/results/spec-bench-before.jsonl
    python -m benchmarks.spec_bench_table benchmarks/results/spec-bench.jsonl

- Every contender is a separate process that keeps its models loaded, and is warmed up before each
  of its turns. All of them answer a question before the next question begins.
- Answers start cold (`benchmarks/engine_worker.py`), so they do not depend on their order. With
  `--keep-learning`, each contender learns from its earlier answers, and drafts from them.
- The results of a question are appended to the output as one line. The benchmark can be stopped at
  any time: the same command resumes after the last line. Questions are ordered so that each part of
  the file has about the same share of every category.
- Every tenth question is also answered by plain decoding a second time, which shows the noise.
- `--bigger` is a more expensive target, made by `benchmarks/bigger_target.py`. It gets every fifth
  question.
- An answer that is slower than 0.9 times the speed of plain decoding is repeated three times,
  together with plain decoding. The median of the three counts.
- `--other NAME=PATH` adds another version of specgen for each setting that drafts. PATH is a
  checkout, or the Python of an environment in which that version is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.answers import command_line
from benchmarks.spec_bench_questions import (
    ADDRESS,
    Question,
    SpecBenchError,
    chosen_ids,
    read_ids,
    read_questions,
    spread,
)
from benchmarks.worker_client import EngineWorker, WorkerCommand, running_worker
from specgen.errors import SpecgenError
from specgen.llama import build
from specgen.session.choose_models import find_target
from specgen.system.files import as_json, path_of
from specgen.system.machine import describe_machine

PLAIN = "plain"
#: The second answer of plain decoding.
CONTROL = "plain again"
#: Separates the name of a setting from that of another version of specgen.
VERSION_MARK = "@"
#: An answer that is slower than this, relative to plain decoding, is repeated.
REPEATED_BELOW = 0.9
N_REPEATS = 3
_CONTROL_STEP = 10
_BIGGER_STEP = 5
_TOP = Path(__file__).resolve().parents[1]
_DEFAULT_OUTPUT = _TOP / "benchmarks" / "results" / "spec-bench.jsonl"
_DEFAULT_TARGET = "qwen2.5-coder-1.5b"
_DEFAULT_DRAFTS = ("smollm2-135m", "qwen2.5-coder-0.5b")

#: The figures of an answer, as `engine_worker.py` writes them.
Figures = dict[str, Any]


# --- contenders -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A contender that is not loaded yet."""

    #: The draft as the user named it, or ``plain``; followed by the name of another version of
    #: specgen, if it is one.
    name: str
    target: Path
    #: A file, ``ngram`` or ``none``.
    draft: str
    command: WorkerCommand


def settings_of(
    target: Path,
    drafts: Mapping[str, str],
    others: Mapping[str, WorkerCommand],
) -> list[Setting]:
    """Return plain decoding, each draft, and each draft with every other version of specgen.

    Args:
        target: The target's file.
        drafts: The drafts by name.
        others: The other versions of specgen by name.
    """
    this_version = WorkerCommand("specgen")
    settings = [Setting(PLAIN, target, "none", this_version)]
    for name, draft in drafts.items():
        settings.append(Setting(name, target, draft, this_version))
        settings += (
            Setting(f"{name}{VERSION_MARK}{version}", target, draft, command)
            for version, command in others.items()
        )
    return settings


def read_other(text: str) -> tuple[str, WorkerCommand]:
    """Parse `--other NAME=PATH`; return the name and the command."""
    name, _, path_text = text.partition("=")
    path = path_of(path_text).absolute()
    if not name or not path_text or not path.exists():
        message = f"{text}: not NAME=PATH with a checkout of specgen or a Python"
        raise argparse.ArgumentTypeError(message)
    if path.is_dir():
        return name, WorkerCommand("specgen", checkout=path)
    return name, WorkerCommand("specgen", python=path, checkout=None)


# --- one question -----------------------------------------------------------------------------


class AnswersQuestions(Protocol):
    """A contender, which `benchmarks.worker_client.EngineWorker` is."""

    def warm_up(self) -> None:
        """Generate a few tokens."""

    def answer(self, prompt: str) -> Figures:
        """Return the figures of an answer, or an object with an `error`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A contender's answer to a question."""

    contender: str
    #: 0 for the first answer, and from 1 on for repeats.
    attempt: int
    figures: Figures


def speedup(drafted: Mapping[str, Any], plain: Mapping[str, Any]) -> float | None:
    """Return the ratio of two answers' speeds after the first token; None if one is unknown."""
    own_speed = drafted.get("tokens_per_s")
    plain_speed = plain.get("tokens_per_s")
    if not own_speed or not plain_speed:
        return None
    return float(own_speed / plain_speed)


def ask_all(
    contenders: Mapping[str, AnswersQuestions],
    text: str,
    n_before: int,
    *,
    has_control: bool,
    repeats_slow: bool = True,
) -> list[Answer]:
    """Let all contenders answer a question, and repeat answers that were slow.

    Args:
        contenders: The contenders by name, one of which is plain decoding.
        text: The question.
        n_before: The number of questions before this one. The order of the drafts rotates with it,
            and is reversed after each full rotation, so that no draft always precedes another one.
        has_control: Whether plain decoding answers twice.
        repeats_slow: Whether slow answers are repeated.
    """
    drafted = [name for name in contenders if name != PLAIN]
    if has_control:
        drafted.append(CONTROL)
    n_rotations, start = divmod(n_before, max(1, len(drafted)))
    rotated = [*drafted[start:], *drafted[:start]]
    if n_rotations % 2 == 1:
        rotated.reverse()
    order = [PLAIN, *rotated]
    answers = [Answer(name, 0, _ask(contenders, name, text)) for name in order]
    if not repeats_slow:
        return answers
    plain = answers[0].figures
    slow = [name for name in order[1:] if _is_slow(answers, name, plain)]
    for attempt in range(1, N_REPEATS + 1):
        names = [PLAIN, *slow] if slow else []
        answers += (Answer(name, attempt, _ask(contenders, name, text)) for name in names)
    return answers


def _is_slow(answers: Sequence[Answer], name: str, plain: Figures) -> bool:
    (own,) = (answer for answer in answers if answer.contender == name)
    ratio = speedup(own.figures, plain)
    return ratio is not None and ratio < REPEATED_BELOW


def _ask(contenders: Mapping[str, AnswersQuestions], name: str, text: str) -> Figures:
    contender = contenders[PLAIN if name == CONTROL else name]
    contender.warm_up()
    return contender.answer(text)


def written(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return answers as they are written to a line of the output.

    The text is left out if it is the same as plain decoding's.
    """
    plain = answers[0].figures
    lines = []
    for index, answer in enumerate(answers):
        figures = {
            name: value
            for name, value in answer.figures.items()
            if name not in ("text", "token_ids")
        }
        if index > 0:
            figures["is_equal"] = answer.figures.get("token_ids") == plain.get("token_ids")
        if index == 0 or not figures["is_equal"]:
            figures["text"] = answer.figures.get("text")
        lines.append({"contender": answer.contender, "attempt": answer.attempt, **figures})
    return lines


# --- the output -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Results:
    """The content of a file of results."""

    #: The lines with which each run of the command begins.
    runs: tuple[dict[str, Any], ...]
    #: The lines about questions.
    lines: tuple[dict[str, Any], ...]

    @property
    def done(self) -> frozenset[tuple[int, str]]:
        """The questions that were answered, each with the name of its target."""
        return frozenset((line["question_id"], line["target"]) for line in self.lines)


def read_results(file: Path) -> Results:
    """Read a file of results. An incomplete last line is ignored.

    Raises:
        SpecBenchError: If it cannot be read, or another line is not JSON.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecBenchError(f"{file} cannot be read: {error.strerror}") from error
    complete_lines, _, _ = text.rpartition("\n")
    try:
        lines = [json.loads(line) for line in complete_lines.split("\n") if line]
    except json.JSONDecodeError as error:
        raise SpecBenchError(f"{file}: not a file of results: {error}") from error
    runs = tuple(line["run"] for line in lines if "run" in line)
    return Results(runs, tuple(line for line in lines if "run" not in line))


class Output:
    """A file of results, to which lines are appended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        #: The content of the file before this run.
        self.before = Results((), ())
        if file.exists():
            self.before = read_results(file)
            self._remove_incomplete_line()
        file.parent.mkdir(parents=True, exist_ok=True)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _remove_incomplete_line(self) -> None:
        data = self._file.read_bytes()
        n_complete = data.rfind(b"\n") + 1
        if n_complete < len(data):
            with self._file.open("r+b") as stream:
                stream.truncate(n_complete)

    def check_same(self, run: Mapping[str, Any]) -> None:
        """Check that a run has the same settings as the earlier runs in the file.

        It may have an additional target.

        Raises:
            SpecBenchError: If the settings differ.
        """
        for earlier in self.before.runs:
            differences = [
                name for name in ("max_tokens", "keeps_learning") if earlier[name] != run[name]
            ]
            for target, contenders in run["contenders"].items():
                if earlier["contenders"].get(target, contenders) != contenders:
                    differences.append(f"contenders for {target}")
            if differences:
                raise SpecBenchError(
                    f"{self._file} was measured with different {', '.join(differences)}",
                    hint="name another file with --output",
                )


def commit_of(folder: Path) -> str | None:
    """Return the last commit that changed specgen, marked if there are uncommitted changes.

    Args:
        folder: A folder in the checkout.

    Returns:
        The commit; None if git does not know it.
    """
    git = ["git", "-C", str(folder)]
    sources = ["--", ":/specgen", ":/kernels"]
    commands = (
        [*git, "log", "-1", "--format=%H", *sources],
        [*git, "status", "--porcelain", "--untracked-files=no", *sources],
    )
    try:
        commit, changes = (
            subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    mark = " with changes" if changes.strip() else ""
    return commit.strip() + mark


# --- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A target with its contenders, and the questions that it gets."""

    target: str
    contenders: Mapping[str, AnswersQuestions]
    question_ids: frozenset[int]
    #: The questions that plain decoding answers twice.
    control_ids: frozenset[int]
    #: Whether slow answers are repeated.
    repeats_slow: bool = True


@dataclass(frozen=True, slots=True)
class Limit:
    """When a run ends early. It always ends between two questions."""

    #: The number of seconds; None for no limit.
    seconds: float | None = None
    #: The number of questions; None for no limit.
    n_questions: int | None = None

    def is_reached(self, seconds: float, n_questions: int) -> bool:
        """Return whether the run ends now."""
        if self.seconds is not None and seconds >= self.seconds:
            return True
        return self.n_questions is not None and n_questions >= self.n_questions


def measure(
    questions: Sequence[Question],
    parts: Sequence[Part],
    output: Output,
    limit: Limit,
) -> None:
    """Ask all questions whose results are not in the output yet."""
    started_s = time.monotonic()
    n_new = 0
    for index, question in enumerate(questions):
        is_new = False
        for part in parts:
            is_part_of_it = question.question_id in part.question_ids
            is_done = (question.question_id, part.target) in output.before.done
            if not is_part_of_it or is_done:
                continue
            if not is_new and limit.is_reached(time.monotonic() - started_s, n_new):
                return
            is_new = True
            answers = ask_all(
                part.contenders,
                question.text,
                index,
                has_control=question.question_id in part.control_ids,
                repeats_slow=part.repeats_slow,
            )
            output.append(
                {
                    "question_id": question.question_id,
                    "category": question.category,
                    "target": part.target,
                    "answers": written(answers),
                }
            )
            _show_progress(index + 1, len(questions), question, part.target, answers)
        if is_new:
            n_new += 1


def _show_progress(
    n_done: int, n_questions: int, question: Question, target: str, answers: Sequence[Answer]
) -> None:
    """Print the speed-ups of a question's first answers to stderr."""
    plain = answers[0].figures
    parts = []
    for answer in answers[1:]:
        ratio = speedup(answer.figures, plain) if answer.attempt == 0 else None
        if ratio is not None:
            parts.append(f"{answer.contender} {ratio:.2f}")
    heading = f"{n_done} of {n_questions}, {question.category}, {target}"
    print(f"{heading}: {', '.join(parts)}", file=sys.stderr)


def start_all(
    settings: Sequence[Setting],
    arguments: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> dict[str, EngineWorker]:
    """Start all contenders with their models loaded; the stack ends them."""
    workers = {}
    for setting in settings:
        print(f"loading {setting.name}, {setting.target.name}", file=sys.stderr)
        choices = {
            "target": str(setting.target),
            "draft": setting.draft,
            "max_tokens": arguments.max_tokens,
            "keeps_learning": arguments.keep_learning,
        }
        workers[setting.name] = stack.enter_context(running_worker(setting.command, choices))
    return workers


def descriptions(workers: Mapping[str, EngineWorker]) -> dict[str, dict[str, Any]]:
    """Return the contenders' descriptions of themselves, with the commit instead of the folder."""
    described = {}
    for name, worker in workers.items():
        about = dict(worker.about)
        folder = Path(about.pop("folder"))
        described[name] = {**about, "commit": commit_of(folder)}
    return described


# --- the command ------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", type=Path, nargs="?", help="Spec-Bench's question.jsonl")
    parser.add_argument("-m", "--target", default=_DEFAULT_TARGET, help="a file or a model's name")
    parser.add_argument("-md", "--draft", action="append", help="a file or a model's name")
    parser.add_argument("--bigger", type=Path, help="a more expensive target")
    parser.add_argument("--settings", nargs="+", help="only these drafts: ngram, or one of -md")
    parser.add_argument(
        "--other", type=read_other, action="append", default=[], metavar="NAME=PATH"
    )
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--half", type=Path, help="only the questions in this file")
    parser.add_argument(
        "--not-half", type=Path, help="only the questions that are not in this file"
    )
    parser.add_argument("--minutes", type=float, help="stop after the question that exceeds this")
    parser.add_argument("--count", type=int, help="stop after this number of new questions")
    parser.add_argument("--keep-learning", action="store_true", help="answers do not start cold")
    parser.add_argument("--output", type=Path, default=_DEFAULT_OUTPUT)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    if arguments.questions is None:
        sys.exit(f"Spec-Bench's questions are missing: download {ADDRESS}, and name the file")
    # Terminate cleanly on SIGTERM, so that the workers end, too.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    try:
        run(arguments)
    except SpecgenError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"{error.message}{hint}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes after the last question")


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark."""
    questions = spread(read_questions(arguments.questions))
    question_ids = _question_ids(questions, arguments)
    control_ids = chosen_ids(questions, _CONTROL_STEP)
    settings = _settings(arguments, question_ids)
    choices = {
        "max_tokens": arguments.max_tokens,
        "keeps_learning": arguments.keep_learning,
        "contenders": {
            target: [setting.name for setting in own] for target, own in settings.items()
        },
    }
    output = Output(arguments.output)
    output.check_same(choices)
    with contextlib.ExitStack() as stack:
        workers = {target: start_all(own, arguments, stack) for target, own in settings.items()}
        about = {target: descriptions(own) for target, own in workers.items()}
        output.append({"run": {**_circumstances(), **choices, "about": about}})
        # A contender that keeps what it has learnt would find the answer to repeat in its memory.
        repeats_slow = not arguments.keep_learning
        parts = [
            Part(target, workers[target], question_ids[target], control_ids, repeats_slow)
            for target in workers
        ]
        seconds = None if arguments.minutes is None else 60.0 * arguments.minutes
        measure(_selected(questions, arguments), parts, output, Limit(seconds, arguments.count))


def _question_ids(
    questions: Sequence[Question], arguments: argparse.Namespace
) -> dict[str, frozenset[int]]:
    """Return the questions that each target gets, by the target's name."""
    target = Path(arguments.target).name
    question_ids = {target: frozenset(question.question_id for question in questions)}
    if arguments.bigger is None:
        print("the larger target is skipped: there is no --bigger", file=sys.stderr)
    elif not arguments.bigger.is_file():
        print(f"the larger target is skipped: there is no {arguments.bigger}", file=sys.stderr)
    else:
        question_ids[arguments.bigger.name] = chosen_ids(questions, _BIGGER_STEP)
    return question_ids


def _settings(arguments: argparse.Namespace, targets: Iterable[str]) -> dict[str, list[Setting]]:
    """Return the contenders for each target, by the target's name."""
    drafts = _drafts(arguments)
    target, *bigger = targets
    # Other versions of specgen are compared only with the target that gets all questions.
    file = find_target(arguments.target, quiet=False)
    settings = {target: settings_of(file, drafts, dict(arguments.other))}
    for name in bigger:
        settings[name] = settings_of(arguments.bigger, drafts, {})
    return settings


def _selected(questions: Sequence[Question], arguments: argparse.Namespace) -> list[Question]:
    """Return the questions that `--half` and `--not-half` select."""
    selected = list(questions)
    if arguments.half is not None:
        ids = read_ids(arguments.half)
        selected = [question for question in selected if question.question_id in ids]
    if arguments.not_half is not None:
        ids = read_ids(arguments.not_half)
        selected = [question for question in selected if question.question_id not in ids]
    return selected


def _drafts(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the drafts to measure by name. Each is ``ngram`` or the file of a model."""
    names = arguments.draft or _DEFAULT_DRAFTS
    wanted = arguments.settings or ["ngram", *map(_short, names)]
    drafts = {"ngram": "ngram"}
    for name in names:
        if _short(name) in wanted:
            drafts[_short(name)] = str(find_target(name, quiet=False))
    unknown = [name for name in wanted if name not in drafts]
    if unknown:
        raise SpecBenchError(f"--settings {unknown[0]}: neither ngram nor one of -md")
    return {name: drafts[name] for name in wanted}


def _short(draft: str) -> str:
    """Return the name of a draft in tables: the model's name or the file's."""
    return Path(draft).name


def _circumstances() -> dict[str, Any]:
    """Describe the machine and how the benchmark was started, for the first line of a run."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line("spec_bench", sys.argv[1:]),
        "commit": commit_of(_TOP),
        "machine": as_json(describe_machine()),
        "llama_cpp": as_json(build()),
    }


if __name__ == "__main__":
    main()
