"""Spec-Bench's questions, in an order in which any beginning represents all of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import SpecgenError

ADDRESS = "https://github.com/hemingkx/Spec-Bench/blob/main/data/spec_bench/question.jsonl"
#: Spec-Bench reports the categories of MT-Bench as one.
MT_BENCH = "multi-turn conversation"
MT_BENCH_CATEGORIES = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)


class SpecBenchError(SpecgenError):
    """A file of questions or of results is not valid."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question of Spec-Bench."""

    question_id: int
    category: str
    #: The first turn.
    text: str
    #: Its number within its category, from 0.
    rank: int

    @property
    def task(self) -> str:
        """The category as Spec-Bench reports it."""
        return task_of(self.category)


def task_of(category: str) -> str:
    """Return the category as Spec-Bench reports it."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def read_questions(file: Path) -> list[Question]:
    """Read Spec-Bench's file.

    Raises:
        SpecBenchError: If it cannot be read, or a line is not a question.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SpecBenchError(
            f"{file} cannot be read: {reason}", hint=f"download {ADDRESS}"
        ) from error
    n_seen: defaultdict[str, int] = defaultdict(int)
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            category = str(fields["category"])
            question = Question(
                int(fields["question_id"]), category, str(fields["turns"][0]), n_seen[category]
            )
        except (ValueError, LookupError, TypeError) as error:
            message = f"{file}, line {number}: not a question of Spec-Bench"
            raise SpecBenchError(message, hint=f"download {ADDRESS}") from error
        questions.append(question)
        n_seen[category] += 1
    return questions


def read_ids(file: Path) -> frozenset[int]:
    """Return the ids of the questions in a file."""
    return frozenset(question.question_id for question in read_questions(file))


def spread(questions: Sequence[Question]) -> list[Question]:
    """Return the questions in an order in which every part has about the same share of each task.

    Within a task that combines several categories, these are spread in the same way.
    """
    by_task: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_task[question.task].append(question)
    # Each question with its relative position within its task, between 0 and 1.
    positioned: list[tuple[float, Question]] = []
    for members in by_task.values():
        # Questions of the same rank are next to each other, in the order of their categories.
        members.sort(key=lambda question: question.rank)
        positioned += (
            ((index + 0.5) / len(members), question) for index, question in enumerate(members)
        )
    positioned.sort(key=lambda pair: pair[0])
    return [question for _, question in positioned]


def chosen_ids(questions: Sequence[Question], step: int) -> frozenset[int]:
    """Choose one question out of every `step`, with about the same share of each task.

    The question whose task was chosen least so far is chosen. Within a task, odd and even ranks are
    chosen equally often, because the questions for tuning are often every other one.

    Args:
        questions: The questions, in the order of `spread`.
        step: The number of questions out of which one is chosen.

    Returns:
        The ids of the chosen questions.
    """
    n_of_task: Counter[str] = Counter()
    n_of_parity: Counter[tuple[str, int]] = Counter()

    def n_chosen(question: Question) -> tuple[int, int]:
        return n_of_task[question.task], n_of_parity[question.task, question.rank % 2]

    chosen = set()
    for start in range(0, len(questions), step):
        question = min(questions[start : start + step], key=n_chosen)
        n_of_task[question.task] += 1
        n_of_parity[question.task, question.rank % 2] += 1
        chosen.add(question.question_id)
    return frozenset(chosen)
