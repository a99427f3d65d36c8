"""Sessions on tiny models, with batch-invariant contexts and drafts of a fixed length."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import Event, FinishedEvent
from specgen.options import ContextOptions, DraftOptions, GenerationOptions, SessionOptions
from specgen.session.engine import Engine, generate
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from tests.helpers.common import EXACT
from tests.helpers.tiny import write_respelled_model
from tests.registry import CACHES
from tests.tiny import TinyConfig, write_tiny_model


def write_models(folder: Path, configs: Mapping[str, TinyConfig]) -> Path:
    """Write tiny models into a folder, each as NAME.gguf."""
    for name, config in configs.items():
        write_tiny_model(folder / f"{name}.gguf", config)
    return folder


def write_pairs(folder: Path, n_ctx_train: int) -> Path:
    """Write a tiny target for each kind of cache, as CACHE.gguf, and its draft as "CACHE
    draft.gguf".
    """
    for name, architecture in CACHES.items():
        config = TinyConfig(architecture=architecture, n_ctx_train=n_ctx_train)
        write_models(folder, {name: config, f"{name} draft": config.draft(0.1)})
    return folder


def folder_with(scope: Any = "module", **configs: TinyConfig) -> Any:
    """A fixture: a folder with tiny models, each as NAME.gguf, the respelled ones with the other
    kind of tokenizer.
    """

    @pytest.fixture(scope=scope)
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        made = tmp_path_factory.mktemp("models")
        for name, config in configs.items():
            write = write_respelled_model if "respelled" in name else write_tiny_model
            write(made / f"{name}.gguf", config)
        return made

    return folder


def options_of(
    target: Path,
    draft: str | Path = "none",
    *,
    context: ContextOptions = EXACT,
    n_tokens: int = 40,
    n_draft: int = 4,
    ignore_eos: bool = False,
    drafting: Mapping[str, Any] | DraftOptions | None = None,
    **other: Any,
) -> SessionOptions:
    """Return the options of a session on tiny models.

    `draft` is a path, a word, or the name of a file next to the target. `drafting` has the
    differences from drafts of a fixed length, or all options of drafts. `other` are more
    `SessionOptions`.
    """
    is_word = draft in ("none", "ngram", "mtp")
    source: Any = draft if is_word or isinstance(draft, Path) else target.parent / f"{draft}.gguf"
    if not isinstance(drafting, DraftOptions):
        chosen = {"policy": "fixed", "max_tokens": n_draft, "p_min": 0.0, **(drafting or {})}
        if "tree" in chosen and chosen["tree"].is_fixed:
            del chosen["max_tokens"]  # the shape decides how many tokens are drafted
        drafting = DraftOptions(**chosen)
    options = SessionOptions(
        target,
        source,
        drafting=drafting,
        generation=GenerationOptions(max_tokens=n_tokens, ignore_eos=ignore_eos),
        target_context=context,
        draft_context=context,
    )
    return replace(options, **other)


def opened(target: Path, draft: str | Path = "none", **changes: Any) -> Session:
    """Open a session with the options of `options_of`."""
    return Session(options_of(target, draft, **changes), time.perf_counter)


def finished(events: list[Event]) -> FinishedEvent:
    assert isinstance(events[-1], FinishedEvent)
    return events[-1]


def answers(engine: Engine, prompts: Sequence[str | Prompt]) -> list[str]:
    """Generate the answers to prompts in parallel, and return them in order."""
    requests = [engine.insert(prompt) for prompt in prompts]
    for _ in engine.run():
        pass
    return [request.text for request in requests]


def answered(session: Session, prompt: str, **choices: Any) -> FinishedEvent:
    """Answer a prompt, without a chat template unless `chat` says so; return the last event."""
    begun = session.prompts.of_text(prompt, **{"chat": False, **choices})
    return finished(list(generate(session, begun)))
