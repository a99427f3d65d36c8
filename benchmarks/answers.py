"""What the benchmarks on real models share: settings in, one summary an answer out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specgen.engine.engine import generate
from specgen.engine.loaded_models import Models
from specgen.engine.prompts import Prompt
from specgen.events import FinishedEvent
from specgen.measure.bench.contenders import NOW
from specgen.options import DraftOptions, DraftSource, parse_tree

#: What a setting may say of a draft: the option's name and what its value is.
_FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "policy": ("policy", str),
    "tree": ("tree", parse_tree),
    "draft_max": ("max_tokens", int),
    "draft_min": ("min_tokens", int),
    "draft_p_min": ("p_min", float),
    "ngram_min": ("ngram_min", int),
    "ngram_max": ("ngram_max", int),
    "translate": ("translate", str),
    "verifier": ("verifier", str),
    "ngrams": ("ngrams", lambda value: value == "on"),
}


def read_setting(setting: str) -> tuple[DraftSource, DraftOptions]:
    """What `DRAFT[:option=value,...]` says; DRAFT is a file, `ngram` or `none`."""
    name, _, values = setting.partition(":")
    changes: dict[str, Any] = {}
    for assignment in filter(None, values.split(",")):
        key, _, value = assignment.partition("=")
        field, kind = _FIELDS[key]
        changes[field] = kind(value)
    draft: DraftSource = Path(name)
    if name in ("ngram", "none"):
        draft = "ngram" if name == "ngram" else "none"
    return draft, DraftOptions(**changes)


def begin(loaded: Models, prompt: str) -> Prompt:
    """The prompt in the model's chat template; as it is for a model without one."""
    return loaded.prompts.of_text(prompt, now=NOW)


def answer(loaded: Models, prompt: str, *, estimate_gain: bool = False) -> FinishedEvent:
    """Generate an answer to a prompt."""
    *_, last = generate(loaded, begin(loaded, prompt), estimate_gain=estimate_gain)
    assert isinstance(last, FinishedEvent)
    return last
