"""A prompt that one process read is not read again by the next, and the text is the same."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import UsageError
from specgen.events import FinishedEvent, NoticeEvent
from specgen.options import SamplerOptions
from specgen.session.engine import Engine
from specgen.session.session import Session
from tests.helpers.cli import Specgen
from tests.helpers.common import EXACT
from tests.helpers.sessions import finished, opened, write_pairs
from tests.registry import CACHES

PROMPT = "the cat is in the else for with that it be not self " * 4
CONTEXT = replace(EXACT, n_ctx=512)
OTHER = "was made with another model or other settings: it is made anew"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("prompts"), n_ctx_train=1024)


def session_on(target: Path, cache: Path | None, draft: str = "none", **more: Any) -> Session:
    choices = {"n_draft": 3, "n_tokens": 20, "ignore_eos": True, "context": CONTEXT, **more}
    return opened(target, draft, drafting={"ngrams": False}, prompt_cache=cache, **choices)


def answered(
    target: Path, cache: Path | None, prompt: str = PROMPT, **choices: Any
) -> tuple[FinishedEvent, list[str]]:
    """The answer of a session of its own, and its notices."""
    with session_on(target, cache, **choices) as session, Engine(session) as engine:
        request = engine.insert(session.prompts.of_text(prompt, chat=False))
        events = list(engine.stream(request))
    notices = [event.message for event in events if isinstance(event, NoticeEvent)]
    return finished(events), notices


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cache", CACHES)
def test_the_same_text_comes_of_a_prompt_that_is_not_read_again(
    folder: Path, tmp_path: Path, cache: str, temperature: float, drafted: bool
) -> None:
    target, file = folder / f"{cache}.gguf", tmp_path / "kept"
    choices: dict[str, Any] = {
        "draft": f"{cache} draft" if drafted else "none",
        "sampler": SamplerOptions(temperature=temperature, seed=3),
    }
    expected = answered(target, None, **choices)[0]
    first, notices = answered(target, file, **choices)
    second = answered(target, file, **choices)[0]
    assert expected.token_ids == first.token_ids == second.token_ids
    if notices:
        assert "recurrent state" in notices[0]
        assert not file.exists()
    else:
        assert first.n_cached_tokens == 0
        assert second.n_cached_tokens == second.n_prompt_tokens - 1


@pytest.mark.parametrize("change", ["model", "damage"])
def test_what_does_not_fit_is_made_anew(folder: Path, tmp_path: Path, change: str) -> None:
    target, file = folder / "attention.gguf", tmp_path / "kept"
    answered(target, file)
    if change == "model":
        target = folder / "attention draft.gguf"
    else:
        file.write_bytes(file.read_bytes()[:-1])
    last, notices = answered(target, file)
    assert last.n_cached_tokens == 0
    assert last.token_ids == answered(target, None)[0].token_ids
    why = OTHER if change == "model" else "is damaged: it is made anew"
    assert notices == [f"{file} {why}"]
    assert answered(target, file)[0].n_cached_tokens > 0


@pytest.mark.parametrize("content", [b"a text\n", b'{"format": "another"}\n', b"\xff\xfe"])
def test_a_file_of_another_kind_is_refused_and_stays(
    folder: Path, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "mine"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="this file is no prompt cache"):
        answered(folder / "attention.gguf", file)
    assert file.read_bytes() == content


def test_a_device_is_refused_before_anything_is_answered(folder: Path, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.symlink_to(os.devnull)
    with pytest.raises(UsageError, match="this file is no prompt cache"):
        answered(folder / "attention.gguf", device)
    assert device.is_symlink()


def test_the_command_line_keeps_a_prompt(folder: Path, tmp_path: Path, specgen: Specgen) -> None:
    file, target = tmp_path / "kept", folder / "attention.gguf"
    command = ("run", "-m", target, "--draft", "none", "--raw", "-n", "8", "--prompt-cache", file)
    first = specgen(*command, "--json", PROMPT)
    second = specgen(*command, "--json", PROMPT)
    assert first.code == second.code == 0
    assert '"n_cached_tokens": 0' in first.out
    assert '"n_cached_tokens": 0' not in second.out
    missing = tmp_path / "no folder" / "kept"
    refused = specgen(*command[:-1], missing, PROMPT)
    assert refused.out == ""
    assert "there is no folder" in refused.err
