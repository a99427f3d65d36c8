"""What a draft gains by learning from the user's own answers: 40 similar requests, in order.

Each request shows a function of a package of Python's standard library without its docstring, and
asks the target to write one. After every ten answers, the draft is trained on all answers so far.
The last ten requests are then answered in four ways:

- without: without `--learn`;
- store: with repetitions of earlier answers as drafts;
- learnt: with the trained draft;
- both.

All texts must be equal. A paired test compares the last ten answers with those of "without", answer
by answer (exact one-sided sign-flip test of the mean difference).

    python benchmarks/learning.py qwen2.5-coder-1.5b smollm2-135m --output learning.json

With `--replay`, the target answers the last ten requests once, and drafts for these recorded
answers are then counted in all four ways without running the target. The acceptance is the same,
and does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from specgen.events import FinishedEvent
from specgen.llama.kernels.admission import choose_kernels
from specgen.llama.kernels.attached import computing
from specgen.measure.draft_trial import Baseline, Replay, TrialAnswer, replay
from specgen.measure.prompts import FIXED_NOW
from specgen.models.files import identify, learning_folder
from specgen.options import ContextOptions, DraftOptions, GenerationOptions, SessionOptions
from specgen.session.calibration import calibrate
from specgen.session.choose_models import find_target
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import Engine
from specgen.session.kept_answers import last_number
from specgen.session.open import open_measurements
from specgen.session.session import Session
from specgen.system.files import as_json
from specgen.system.folders import cache_folder
from specgen.system.machine import describe_machine
from specgen.train.online_learning import Lesson, learn
from specgen.train.training_loop import Budget

N_PROMPTS = 40
#: The answers between two trainings.
N_BLOCK = 10
REQUEST = (
    "Write the docstring of this function of asyncio, in Google's style, with its arguments, "
    "what it returns and what it raises. Answer with the docstring only.\n\n"
    "```python\n{source}\n```"
)
#: The lines of the functions that are used: the minimum and the maximum.
LINES = (6, 24)
ARMS = ("without", "store", "learnt", "both")
POLICIES = {
    "cost": DraftOptions(),
    "fixed": DraftOptions(policy="fixed", max_tokens=4, p_min=0.0, ngrams=True),
}


def prompts() -> list[str]:
    """The requests, for a random sample of the package's functions."""
    functions: list[str] = []
    for path in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            source = ast.unparse(node)
            if LINES[0] <= len(source.splitlines()) <= LINES[1] and source not in functions:
                functions.append(source)
    order = np.random.default_rng(0).permutation(len(functions))[:N_PROMPTS]
    return [REQUEST.format(source=functions[index]) for index in order]


@contextlib.contextmanager
def opened(options: SessionOptions) -> Iterator[Engine]:
    """Open an engine with its own session and measurements."""
    with (
        Session(options, time.perf_counter, open_measurements()) as loaded,
        Engine(loaded, n_ctx=2048) as engine,
    ):
        calibrate(loaded)
        yield engine


def ask(engine: Engine, prompt: str) -> FinishedEvent:
    """Answer a prompt; return the last event."""
    *_, last = engine.stream(engine.insert(prompt))
    assert isinstance(last, FinishedEvent)
    return last


def lesson(folder: Path, target: Path, draft: Path, minutes: float) -> Lesson:
    """Train the draft on the answers that the folder keeps."""

    def progress(done: int, total: int) -> None:
        print(f"\rstep {done} of {total} ", end="", file=sys.stderr)

    budget = Budget(time.monotonic, time.monotonic() + 60.0 * minutes, progress=progress)
    result = learn(folder, target, draft, budget)
    assert result is not None
    print(f"\n{result.text}; {result.n_steps} steps, {result.seconds:.0f} s", file=sys.stderr)
    return result


def arms_of(options: SessionOptions, policy: str, folder: Path, cache: Path) -> dict[str, Any]:
    """The options of each arm. Repetitions are looked up in the answers in `cache`."""
    drafting = POLICIES[policy]
    with_store = replace(drafting, lookup_store=True)
    base = replace(options, drafting=drafting)
    return {
        "without": base,
        "store": replace(base, drafting=with_store, cache=cache),
        "learnt": replace(base, learning=folder),
        "both": replace(base, drafting=with_store, cache=cache, learning=folder),
    }


def sign_flip(differences: Sequence[float]) -> float:
    """The probability of a mean difference at least this large if all signs were random."""
    values = np.array(differences)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
    return float(np.mean(signs @ values >= values.sum() - 1e-9))


def compared(answers: dict[str, list[Any]]) -> dict[str, Any]:
    """The figures of each arm, with p-values that compare it with the one without learning."""

    def rate(event: FinishedEvent | Replay) -> float:
        counts = event.stats if isinstance(event, Replay) else event
        return counts.n_accepted / max(1, counts.n_drafted)

    def length(event: FinishedEvent | Replay) -> float:
        n_rounds = event.stats.n_rounds if isinstance(event, Replay) else event.n_rounds
        return event.n_tokens / n_rounds

    def speed(event: FinishedEvent) -> float:
        return event.n_tokens / event.wall_s

    measures: dict[str, Any] = {"acceptance_rate": rate, "tokens_a_round": length}
    if isinstance(answers["without"][0], FinishedEvent):
        measures["tokens_per_s"] = speed
    figures: dict[str, Any] = {}
    for arm, events in answers.items():
        figures[arm] = {
            name: statistics.fmean(map(measure, events)) for name, measure in measures.items()
        }
        if arm != "without":
            for name, measure in measures.items():
                pairs = zip(events, answers["without"], strict=True)
                differences = [measure(own) - measure(other) for own, other in pairs]
                figures[arm][f"p_{name}"] = sign_flip(differences)
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, help="keep answers and trained drafts here, and resume from them"
    )
    parser.add_argument("--replay", action="store_true", help="draft for recorded answers")
    parser.add_argument("--one-lesson", action="store_true", help="stop after the next training")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--policy", choices=POLICIES, nargs="*", default=list(POLICIES))
    arguments = parser.parse_args()
    choose_kernels("auto", cache_folder())
    target = find_target(arguments.target, quiet=False)
    draft = find_target(arguments.draft, quiet=False)
    identity = identify(target)
    assert identity is not None
    with contextlib.ExitStack() as stack:
        place = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = learning_folder(place, identity)
        cache = place / "cache"
        options = SessionOptions(
            target,
            draft,
            generation=GenerationOptions(max_tokens=arguments.max_tokens),
            target_context=ContextOptions(n_threads=2),
            draft_context=ContextOptions(n_threads=2),
        )
        requests = prompts()
        lessons = _lessons(place)
        while len(lessons) < N_PROMPTS // N_BLOCK - 1:
            lessons = _answer_and_learn(options, requests, folder, cache, arguments.minutes, place)
            if arguments.one_lesson:
                return
        measure = _replay if arguments.replay else _measure
        results = {
            policy: measure(arms_of(options, policy, folder, cache), requests[-N_BLOCK:])
            for policy in arguments.policy
        }
    document = {
        "machine": as_json(describe_machine()),
        "kernels": computing(),
        "target": target.name,
        "draft": draft.name,
        "max_tokens": arguments.max_tokens,
        "prompts": requests,
        "lessons": lessons,
        "results": results,
    }
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    figures = {policy: result["figures"] for policy, result in results.items()}
    print(json.dumps(figures, indent=1))


def _lessons(place: Path) -> list[dict[str, Any]]:
    """The results of the trainings that earlier runs left in the folder."""
    state = place / "lessons.json"
    return json.loads(state.read_text()) if state.is_file() else []


def _answer_and_learn(
    options: SessionOptions,
    requests: Sequence[str],
    folder: Path,
    cache: Path,
    minutes: float,
    place: Path,
) -> list[dict[str, Any]]:
    """Answer the next block of requests, unless that was done, and train; return all lessons."""
    lessons = _lessons(place)
    kept = replace(
        options, learning=folder, cache=cache, drafting=replace(DraftOptions(), lookup_store=True)
    )
    first = len(lessons) * N_BLOCK
    if last_number(folder) == first:
        with (
            Session(kept, time.perf_counter, open_measurements()) as loaded,
            Engine(loaded, n_parallel=N_BLOCK, n_ctx=1024) as engine,
        ):
            calibrate(loaded)
            answers = [engine.insert(each) for each in requests[first : first + N_BLOCK]]
            for _ in engine.run():
                pass
            assert all(answer.text is not None for answer in answers)  # none has failed
    lessons.append(asdict(lesson(folder, options.target, Path(options.draft), minutes)))
    (place / "lessons.json").write_text(json.dumps(lessons))
    return lessons


def _measure(arms: dict[str, SessionOptions], requests: Sequence[str]) -> dict[str, Any]:
    """Answer requests with all arms, which take turns for each request."""
    answers: dict[str, list[FinishedEvent]] = {arm: [] for arm in arms}
    with contextlib.ExitStack() as stack:
        engines = {}
        for arm, options in arms.items():
            # Each arm gets a copy, so that what it keeps does not help the others.
            copies = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            copied = replace(
                options,
                learning=_copy(options.learning, copies / "learning"),
                cache=_copy(options.cache, copies / "cache"),
            )
            engines[arm] = stack.enter_context(opened(copied))
        for number, prompt in enumerate(requests):
            for turn in range(len(arms)):
                arm = list(arms)[(number + turn) % len(arms)]
                answers[arm].append(ask(engines[arm], prompt))
            print(f"\ranswer {number + 1} of {len(requests)} ", end="", file=sys.stderr)
    texts = {arm: [event.text for event in events] for arm, events in answers.items()}
    if any(each != texts["without"] for each in texts.values()):
        raise SystemExit("the texts differ")
    return {
        "figures": compared(answers),
        "texts": texts["without"],
        "answers": {arm: [_scalars(event) for event in events] for arm, events in answers.items()},
    }


def _replay(arms: dict[str, SessionOptions], requests: Sequence[str]) -> dict[str, Any]:
    """Record the target's answers to requests, and draft for them with all arms."""
    plain = replace(arms["without"], draft="none")
    n_ctx = 1024
    with (
        Session(plain, time.perf_counter) as loaded,
        Engine(loaded, n_parallel=len(requests), n_ctx=n_ctx) as engine,
    ):
        insertions = [engine.insert(prompt) for prompt in requests]
        list(engine.run())
    answers = []
    for prompt, done in zip(requests, insertions, strict=True):
        assert done.finished is not None
        answers.append(TrialAnswer(prompt, done.finished.token_ids))
    baseline = Baseline(tuple(answers), (), n_ctx, {1: 1.0, 2: 1.0})  # costs decide nothing
    replayed: dict[str, list[Replay]] = {}
    for arm, options in arms.items():
        with (
            Session(options, time.perf_counter, vocabulary_only=True) as loaded,
            loaded.draft_contexts(n_ctx) as (context,),
        ):
            replayed[arm] = []
            for answer in answers:
                context.remove(0)
                formatted = loaded.prompts.of_text(answer.prompt, now=FIXED_NOW)
                generation = DrafterFactory(loaded).new_answer(formatted, n_ctx, (context,), 0)
                replayed[arm].append(replay(generation, answer, baseline, loaded.clock))
    return {
        "figures": compared(replayed),
        "texts": [done.text for done in insertions],
        "answers": {arm: [_scalars(each) for each in replays] for arm, replays in replayed.items()},
    }


def _scalars(event: FinishedEvent | Replay) -> dict[str, Any]:
    """The scalar figures of an answer, without its text and its counts by position."""
    figures = asdict(event)
    figures |= figures.pop("stats", {})
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _copy(source: Path | None, destination: Path) -> Path | None:
    if source is None:
        return None
    shutil.copytree(source, destination)
    return destination


if __name__ == "__main__":
    main()
