"""Figures of a server in Prometheus's format.

Names are those that llama.cpp's server and vLLM share, with our prefix. Figures that they lack have names in
the same style.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from specgen.errors import SpecgenError
from specgen.events import CommittedEvent, DraftedEvent, Event, FinishedEvent, VerifiedEvent

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_DRAFTS = "spec_decode_num"
#: The figures of a model.
_COUNTERS = {
    f"{_DRAFTS}_drafts": "Drafts that the target verified.",
    f"{_DRAFTS}_draft_tokens": "Tokens of these drafts.",
    f"{_DRAFTS}_accepted_tokens": "Tokens of these drafts that the target accepted.",
    f"{_DRAFTS}_accepted_tokens_per_pos": "Accepted tokens by their position in the draft, from 0 on.",
    f"{_DRAFTS}_wasted_tokens": "Drafted tokens that were verified in vain.",
    "draft_seconds": "Time in decodes of the draft model.",
    "target_seconds": "Time in decodes of the target, prompts included.",
    "prompt_seconds": "Time in decodes of prompts.",
    "loop_seconds": "Time of specgen itself.",
    "prompt_tokens": "Tokens of prompts, cached ones included.",
    "prompt_tokens_cached": "Tokens of prompts that were in the cache already.",
    "prefix_cache_hits": "Prompts that began with cached tokens.",
    "tokens_predicted": "Tokens of answers.",
    "answers": "Answers by how they ended.",
    "model_loads": "How often the model was loaded.",
}
_GAUGES = {
    "estimated_gain": "How many times as fast rounds were as plain decoding, by measured costs; 0 before the first.",
    "requests_processing": "Answers in the making.",
    "requests_deferred": "Answers that wait for a free slot.",
    "slots": "Answers that are made at once, at most; 0 if the model is not loaded.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request to the first token of an answer.",
    "answer_seconds": "From a request to the end of an answer.",
}
#: Counters that are sums of a field of finished answers.
_SUMS = {
    "prompt_tokens": "n_prompt_tokens",
    "prompt_tokens_cached": "n_cached_tokens",
    "tokens_predicted": "n_tokens",
    "draft_seconds": "draft_s",
    "target_seconds": "target_s",
    "prompt_seconds": "prompt_s",
    "loop_seconds": "loop_s",
}
#: Their labels beside the model's name.
_LABELS = {f"{_DRAFTS}_accepted_tokens_per_pos": "position", "answers": "finish_reason"}


class ServerMetrics:
    """The figures of a server: its responses, and those of each model."""

    def __init__(self) -> None:
        # A series more for each counter, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._responses = Counter(
            "specgen:responses", "Responses by their status.", ["status"], registry=registry
        )
        self._families: dict[str, Any] = {}
        families: tuple[tuple[Any, dict[str, str], dict[str, Any]], ...] = (
            (Counter, _COUNTERS, {}),
            (Gauge, _GAUGES, {}),
            (Histogram, _HISTOGRAMS, {"buckets": _SECONDS}),
        )
        for kind, texts, more in families:
            for name, text in texts.items():
                labels = ["model", *([_LABELS[name]] if name in _LABELS else [])]
                made = kind(f"specgen:{name}", text, labels, registry=registry, **more)
                self._families[name] = made

    def of(self, name: str, *labels: object) -> Any:
        """Return a model's figure with its labels: the model, and another one where it has one."""
        return self._families[name].labels(*labels)

    def count_response(self, status: int) -> None:
        self._responses.labels(status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Metrics:
    """Counts the work of a model, also of its later loads. May be used from several threads."""

    def __init__(self, server: ServerMetrics, model: str) -> None:
        self._server = server
        self.model = model
        self._round_s, self._plain_s = 0.0, 0.0
        for name in (_COUNTERS | _GAUGES | _HISTOGRAMS).keys() - _LABELS.keys():
            server.of(name, model)  # so that it is there, with 0

    def _count(self, name: str, n: float, *labels: object) -> None:
        self._server.of(name, self.model, *labels).inc(n)

    def _set(self, name: str, value: float) -> None:
        self._server.of(name, self.model).set(value)

    def show_slots(self, n_slots: int) -> None:
        """Show that the model was loaded, with so many slots; with 0 that it was unloaded."""
        self._set("slots", n_slots)
        self._count("model_loads", n_slots > 0)

    def show_load(self, n_open: int, n_parallel: int) -> None:
        """Show how many of the open answers are being generated, and how many wait."""
        self._set("requests_processing", min(n_open, n_parallel))
        self._set("requests_deferred", max(0, n_open - n_parallel))

    def count_events(self, events: Sequence[Event]) -> None:
        n_nodes: dict[int, int] = {}
        for event in events:
            if isinstance(event, DraftedEvent):
                n_nodes[event.sequence] = len(event.nodes)
            elif isinstance(event, VerifiedEvent):
                n_drafted, n_accepted = n_nodes.get(event.sequence, 0), len(event.accepted)
                self._count(f"{_DRAFTS}_drafts", 1)
                self._count(f"{_DRAFTS}_draft_tokens", n_drafted)
                self._count(f"{_DRAFTS}_accepted_tokens", n_accepted)
                self._count(f"{_DRAFTS}_wasted_tokens", n_drafted - n_accepted)
                for position in range(n_accepted):
                    self._count(f"{_DRAFTS}_accepted_tokens_per_pos", 1, position)
            elif isinstance(event, FinishedEvent):
                self._count("answers", 1, event.finish_reason)
                self._count("prefix_cache_hits", event.n_cached_tokens > 0)
                for name, field in _SUMS.items():
                    self._count(name, getattr(event, field))

    def count_text(self, n_tokens: int, seconds: float) -> None:
        self._count("prompt_tokens", n_tokens)
        self._count("prompt_seconds", seconds)

    def count_round(
        self, events: Sequence[Event], n_answers: int, seconds: float, plain_s: float
    ) -> None:
        """Count a round of `n_answers` answers without prefill. A plain round, with one token for each
        answer, would have taken `plain_s`."""
        n_tokens = sum(len(event.pieces) for event in events if isinstance(event, CommittedEvent))
        self._round_s += seconds
        self._plain_s += plain_s * n_tokens / n_answers
        self._set("estimated_gain", self._plain_s / self._round_s)

    def count_times(self, news: Sequence[tuple[int, Event | SpecgenError]], seconds: float) -> None:
        """Count the times of answers whose request came `seconds` ago."""
        for _, event in news:
            if isinstance(event, CommittedEvent) and event.n_tokens == len(event.pieces):
                self._server.of("time_to_first_token_seconds", self.model).observe(seconds)
            elif isinstance(event, FinishedEvent):
                self._server.of("answer_seconds", self.model).observe(seconds)
            elif isinstance(event, SpecgenError):
                self._count("answers", 1, "failed")
