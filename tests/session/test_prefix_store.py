"""Prefixes that prompts share outlive the process, and no text changes; what came once is not on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.options import PrefixOptions, SamplerOptions
from specgen.session.engine import Engine
from specgen.session.prefix_store import LEAST_TOKENS
from specgen.session.session import Session
from tests.helpers.common import EXACT
from tests.helpers.mtp import write_mtp_model
from tests.helpers.sessions import finished, opened, write_models
from tests.registry import CACHES
from tests.tiny import TinyConfig

SYSTEM = "the cat is in the else for with that it be not self " * 45
CONTEXT = replace(EXACT, n_ctx=1024, n_batch=128)
QUESTIONS = ("cat and more", "self is it", "not in the end", "with that")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in CACHES.items():
        config = TinyConfig(architecture=architecture, n_ctx_train=2048)
        write_models(folder, {name: config, f"{name} draft": config.draft(0.1)})
    write_mtp_model(folder / "mtp.gguf", "glm4moe")
    return folder


def session_on(target: Path, cache: Path | None, kept: Any = "shared", **more: Any) -> Session:
    """A session as of another process."""
    choices = {"n_draft": 3, "n_tokens": 12, "ignore_eos": True, "context": CONTEXT, **more}
    size = choices.pop("max_bytes", None)
    prefixes = PrefixOptions(kept, size) if cache is not None else None
    drafting = {"ngrams": False}
    return opened(target, drafting=drafting, cache=cache, prefixes=prefixes, **choices)


def answered(
    target: Path, cache: Path | None, *prompts: str, n_parallel: int = 1, **choices: Any
) -> list[FinishedEvent]:
    """The answers of one process, one after the other."""
    ended = []
    with (
        session_on(target, cache, **choices) as session,
        Engine(session, n_parallel=n_parallel) as engine,
    ):
        for prompt in prompts:
            request = engine.insert(session.prompts.of_text(prompt, chat=False))
            ended.append(finished(list(engine.stream(request))))
    return ended


def asked(question: str) -> str:
    return SYSTEM + question


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cache", CACHES)
def test_what_two_prompts_share_is_not_read_again(
    models: Path, tmp_path: Path, cache: str, temperature: float, drafted: bool
) -> None:
    target = models / f"{cache}.gguf"
    choices: dict[str, Any] = {
        "draft": f"{cache} draft" if drafted else "none",
        "sampler": SamplerOptions(temperature=temperature, seed=3),
    }
    ended = [answered(target, tmp_path, asked(each), **choices)[0] for each in QUESTIONS]
    plain = [answered(target, None, asked(each), **choices)[0] for each in QUESTIONS]
    assert [each.token_ids for each in ended] == [each.token_ids for each in plain]
    n_cached = [each.n_cached_tokens for each in ended]
    assert n_cached[:2] == [0, 0]
    assert min(n_cached[2:]) >= LEAST_TOKENS
