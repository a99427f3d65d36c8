"""Other engines: missing ones are skipped with a notice, and each warms up before its turn."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_worker import _timed
from benchmarks.peers import EngineContender, engines_of, warmed_up_each_time
from specgen.measure.benchmark import Contender, Outcome
from tests.helpers.server import session_of
from tests.tiny import TinyConfig, write_tiny_model

OUTCOME = Outcome("answer", 3, None, 10.0, 0.1)


def test_missing_engines_are_skipped_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "target.gguf", TinyConfig())
    python = tmp_path / "python"
    with session_of(target) as session, contextlib.ExitStack() as stack:
        engines = engines_of(session, {"openvino": None, "ik-llama": python}, stack)
        assert list(engines) == []
    assert capsys.readouterr().err.splitlines() == [
        "OpenVINO was skipped: there is no --openvino",
        "OpenVINO prompt lookup was skipped: there is no --openvino",
        f"ik_llama.cpp was skipped: {python} cannot be run: No such file or directory",
        f"ik_llama.cpp repacked was skipped: {python} cannot be run: No such file or directory",
    ]


def test_specgen_is_warmed_up_before_each_turn() -> None:
    calls: list[str] = []

    def answer(prompt: str) -> Outcome:
        calls.append(prompt)
        return OUTCOME

    contender = Contender(0.0, "plain", answer, lambda: calls.append("warm up"))
    warmed = warmed_up_each_time(contender)
    assert [warmed.answer("Why?"), warmed.answer("Who?")] == [OUTCOME, OUTCOME]
    assert calls == ["warm up", "Why?", "warm up", "Who?"]


class FakeWorker:
    """An engine that answers with the last tokens of its prompt, and an end-of-text token."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.n_warm_ups = 0

    def warm_up(self, tokens: Sequence[int]) -> None:
        assert tokens
        self.n_warm_ups += 1

    def answer(self, _prompt: str, tokens: Sequence[int]) -> dict[str, Any]:
        return _timed([*tokens[-3:], self.end], 10.0, 10.5, 12.0)


def test_another_engine_is_given_tokens_and_returns_tokens(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target.gguf", TinyConfig())
    with session_of(target) as session:
        vocabulary = session.target.vocabulary
        worker: Any = FakeWorker(vocabulary.end_tokens()[0])
        outcome = EngineContender("other", worker, session).answer("the cat")
        tokens = session.prompts.of_text("the cat").tokens[-3:]
        text = b"".join(map(vocabulary.token_bytes, tokens)).decode()
    assert (outcome.text, outcome.token_ids, worker.n_warm_ups) == (text, tuple(tokens), 1)
    assert (outcome.n_tokens, outcome.tokens_per_s) == (4, 2.0)
    assert outcome.time_to_first_token_s == 0.5


def test_a_one_token_answer_has_no_speed() -> None:
    assert _timed([1], 0.0, 0.5, 0.5)["tokens_per_s"] is None
