"""Figures of a server in Prometheus's format, by the names that llama.cpp's server and vLLM share."""

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
from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    ReadingEvent,
    VerifiedEvent,
)

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_DRAFTS = "spec_decode_num"
#: Counters that add up a field of finished answers: name, field, help.
_SUMS = (
    ("prompt_tokens_cached", "n_cached_tokens", "Tokens of prompts that were in the cache."),
    ("tokens_predicted", "n_tokens", "Tokens of answers."),
    ("draft_seconds", "draft_s", "Time in decodes of the draft model."),
    ("target_seconds", "target_s", "Time in decodes of the target, prompts included."),
    ("prompt_seconds", "prompt_s", "Time in decodes of prompts."),
    ("loop_seconds", "loop_s", "Time of specgen itself."),
)
#: The other figures of a model: name, kind, help, and a label beside the model's name.
_FIGURES = (
    ("prompt_tokens", Counter, "Tokens of prompts as they are read, cached ones included.", ""),
    (f"{_DRAFTS}_drafts", Counter, "Drafts that the target verified.", ""),
    (f"{_DRAFTS}_draft_tokens", Counter, "Tokens of these drafts.", ""),
    (f"{_DRAFTS}_accepted_tokens", Counter, "Tokens of drafts that were accepted.", ""),
    (f"{_DRAFTS}_accepted_tokens_per_pos", Counter, "The same by their position.", "position"),
    (f"{_DRAFTS}_wasted_tokens", Counter, "Drafted tokens that were verified in vain.", ""),
    ("prefix_cache_hits", Counter, "Prompts that began with cached tokens.", ""),
    ("answers", Counter, "Answers by how they ended.", "finish_reason"),
    ("model_loads", Counter, "How often the model was loaded.", ""),
    ("estimated_gain", Gauge, "How many times as fast as plain decoding, by measured costs.", ""),
    ("requests_processing", Gauge, "Answers in the making.", ""),
    ("requests_deferred", Gauge, "Answers that wait for a free slot.", ""),
    ("slots", Gauge, "Answers at once, at most; 0 if the model is not loaded.", ""),
    ("time_to_first_token_seconds", Histogram, "From a request to an answer's first token.", ""),
    ("answer_seconds", Histogram, "From a request to the end of an answer.", ""),
)


class ServerMetrics:
    """The figures of a server: its responses, and those of each model."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry}
        self._responses = Counter(
            "specgen:responses", "Responses by their status.", ["status"], **made
        )
        self.figures: dict[str, Any] = {}
        kind: Any
        for name, kind, text, label in (
            *((name, Counter, text, "") for name, _, text in _SUMS),
            *_FIGURES,
        ):
            more: dict[str, Any] = {"buckets": _SECONDS} if kind is Histogram else {}
            labels = ["model", *filter(None, [label])]
            self.figures[name] = kind(f"specgen:{name}", text, labels, **made, **more)

    def count_response(self, status: int) -> None:
        self._responses.labels(status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Metrics:
    """Counts the work of a model, also of its later loads. May be used from several threads."""

    def __init__(self, server: ServerMetrics, model: str) -> None:
        self._figures, self.model = server.figures, model
        self._round_s, self._plain_s = 0.0, 0.0
        #: Tokens of prompts that are counted while they are read, by the answer's number.
        self._n_counted: dict[int, int] = {}
        for name in server.figures.keys() - {name for name, *_, label in _FIGURES if label}:
            self._of(name)  # so that it is there, with 0

    def _of(self, name: str, *labels: object) -> Any:
        return self._figures[name].labels(self.model, *labels)

    def show_slots(self, n_slots: int) -> None:
        """Show that the model was loaded, with so many slots; with 0 that it was unloaded."""
        self._n_counted.clear()
        self._of("slots").set(n_slots)
        self._of("model_loads").inc(n_slots > 0)

    def show_load(self, n_open: int, n_parallel: int) -> None:
        """Show how many of the open answers are being generated, and how many wait."""
        self._of("requests_processing").set(min(n_open, n_parallel))
        self._of("requests_deferred").set(max(0, n_open - n_parallel))

    def count_events(self, events: Sequence[Event]) -> None:
        n_nodes: dict[int, int] = {}
        for event in events:
            if isinstance(event, DraftedEvent):
                n_nodes[event.sequence] = len(event.nodes)
            elif isinstance(event, VerifiedEvent):
                n_drafted, n_accepted = n_nodes.get(event.sequence, 0), len(event.accepted)
                self._of(f"{_DRAFTS}_drafts").inc()
                self._of(f"{_DRAFTS}_draft_tokens").inc(n_drafted)
                self._of(f"{_DRAFTS}_accepted_tokens").inc(n_accepted)
                self._of(f"{_DRAFTS}_wasted_tokens").inc(n_drafted - n_accepted)
                for position in range(n_accepted):
                    self._of(f"{_DRAFTS}_accepted_tokens_per_pos", position).inc()
            elif isinstance(event, ReadingEvent):
                self._count_prompt(event.sequence, event.n_read)
            elif isinstance(event, FinishedEvent):
                self._of("answers", event.finish_reason).inc()
                self._of("prefix_cache_hits").inc(event.n_cached_tokens > 0)
                if event.n_tokens or event.finish_reason != "interrupted":
                    self._count_prompt(event.sequence, event.n_prompt_tokens)
                self._n_counted.pop(event.sequence, None)
                for name, field, _ in _SUMS:
                    self._of(name).inc(getattr(event, field))

    def _count_prompt(self, sequence: int, n_tokens: int) -> None:
        self._of("prompt_tokens").inc(n_tokens - self._n_counted.get(sequence, 0))
        self._n_counted[sequence] = n_tokens

    def count_text(self, n_tokens: int, seconds: float) -> None:
        self._of("prompt_tokens").inc(n_tokens)
        self._of("prompt_seconds").inc(seconds)

    def count_round(self, events: Sequence[Event], seconds: float, plain_token_s: float) -> None:
        """Count a round without prefill. A token of a plain round would have taken `plain_token_s`."""
        n_tokens = sum(len(event.pieces) for event in events if isinstance(event, CommittedEvent))
        self._round_s += seconds
        self._plain_s += plain_token_s * n_tokens
        self._of("estimated_gain").set(self._plain_s / self._round_s)

    def count_times(self, news: Sequence[tuple[int, Event | SpecgenError]], seconds: float) -> None:
        """Count the times of answers whose request came `seconds` ago."""
        for _, event in news:
            if isinstance(event, CommittedEvent) and event.n_tokens == len(event.pieces):
                self._of("time_to_first_token_seconds").observe(seconds)
            elif isinstance(event, FinishedEvent):
                self._of("answer_seconds").observe(seconds)
            elif isinstance(event, SpecgenError):
                self._of("answers", "failed").inc()
