"""Figures of a server in Prometheus's format.

Names are those that llama.cpp's server and vLLM share, with our prefix. Figures that they lack have names in
the same style.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class ServerMetrics:
    """The figures of a server: its responses, and the `Metrics` of each model."""

    def __init__(self) -> None:
        # A series more for each counter, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._responses = self.family(Counter, "responses", "Responses by their status.", "status")

    def family(self, kind: type[Any], name: str, text: str, *labels: str, **settings: Any) -> Any:
        """Return the figures of a name, which all models share: each has its label."""
        if name not in self._families:
            settings["registry"] = self._registry
            self._families[name] = kind(f"specgen:{name}", text, labels, **settings)
        return self._families[name]

    def count_response(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(status).inc()

    def text(self) -> bytes:
        """Return all figures in Prometheus's text format."""
        return generate_latest(self._registry)


class Metrics:
    """Counts the work of a model, also of its later loads. May be used from several threads."""

    def __init__(self, server: ServerMetrics, model: str) -> None:
        self._server = server
        self.model = model
        drafts = "spec_decode_num"
        self._drafts = self._counter(f"{drafts}_drafts", "Drafts that the target verified.")
        self._drafted = self._counter(f"{drafts}_draft_tokens", "Tokens of these drafts.")
        self._accepted = self._counter(
            f"{drafts}_accepted_tokens", "Tokens of these drafts that the target accepted."
        )
        self._accepted_at = self._counters(
            f"{drafts}_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft, from 0 on.",
            "position",
        )
        self._wasted = self._counter(
            f"{drafts}_wasted_tokens", "Drafted tokens that were verified in vain."
        )
        self._draft_s = self._counter("draft_seconds", "Time in decodes of the draft model.")
        self._target_s = self._counter(
            "target_seconds", "Time in decodes of the target, prompts included."
        )
        self._prompt_s = self._counter("prompt_seconds", "Time in decodes of prompts.")
        self._loop_s = self._counter("loop_seconds", "Time of specgen itself.")
        self._read = self._counter("prompt_tokens", "Tokens of prompts, cached ones included.")
        self._cached = self._counter(
            "prompt_tokens_cached", "Tokens of prompts that were in the cache already."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompts that began with cached tokens.")
        self._told = self._counter("tokens_predicted", "Tokens of answers.")
        self._answers = self._counters("answers", "Answers by how they ended.", "finish_reason")
        self._round_s, self._plain_s = 0.0, 0.0
        self._gain = self._gauge(
            "estimated_gain",
            "How many times as fast rounds were as plain decoding of the same tokens would have "
            "been, by the measured costs of the target's batches; 0 before the first round.",
        )
        self._processing = self._gauge("requests_processing", "Answers in the making.")
        self._deferred = self._gauge("requests_deferred", "Answers that wait for a free slot.")
        self._slots = self._gauge(
            "slots", "Answers that are made at once, at most; 0 if the model is not loaded."
        )
        self._loads = self._counter("model_loads", "How often the model was loaded.")
        self._first_s = self._histogram(
            "time_to_first_token_seconds", "From a request to the first token of an answer."
        )
        self._whole_s = self._histogram("answer_seconds", "From a request to the end of an answer.")

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._server.family(Counter, name, text, "model").labels(self.model)
        return counter

    def _counters(self, name: str, text: str, label: str) -> Callable[[object], Counter]:
        """Return counters by the value of a label."""
        family = self._server.family(Counter, name, text, "model", label)
        return lambda value: family.labels(self.model, value)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge: Gauge = self._server.family(Gauge, name, text, "model").labels(self.model)
        return gauge

    def _histogram(self, name: str, text: str) -> Histogram:
        family = self._server.family(Histogram, name, text, "model", buckets=_SECONDS)
        histogram: Histogram = family.labels(self.model)
        return histogram

    def show_slots(self, n_slots: int) -> None:
        """Show that the model was loaded, with so many slots; with 0 that it was unloaded."""
        self._slots.set(n_slots)
        self._loads.inc(n_slots > 0)

    def count_events(self, events: Sequence[Event]) -> None:
        """Count the events of a step of the engine."""
        n_nodes: dict[int, int] = {}
        for event in events:
            if isinstance(event, DraftedEvent):
                n_nodes[event.sequence] = len(event.nodes)
            elif isinstance(event, VerifiedEvent):
                n_drafted, n_accepted = n_nodes.get(event.sequence, 0), len(event.accepted)
                self._drafts.inc()
                self._drafted.inc(n_drafted)
                self._accepted.inc(n_accepted)
                self._wasted.inc(n_drafted - n_accepted)
                for position in range(n_accepted):
                    self._accepted_at(position).inc()
            elif isinstance(event, FinishedEvent):
                self._count_answer(event)

    def _count_answer(self, finished: FinishedEvent) -> None:
        self._answers(finished.finish_reason).inc()
        self._read.inc(finished.n_prompt_tokens)
        self._cached.inc(finished.n_cached_tokens)
        self._hits.inc(finished.n_cached_tokens > 0)
        self._told.inc(finished.n_tokens)
        self._draft_s.inc(finished.draft_s)
        self._target_s.inc(finished.target_s)
        self._prompt_s.inc(finished.prompt_s)
        self._loop_s.inc(finished.loop_s)

    def count_text(self, n_tokens: int, seconds: float) -> None:
        """Count a text that became an embedding."""
        self._read.inc(n_tokens)
        self._prompt_s.inc(seconds)

    def count_round(
        self, events: Sequence[Event], n_answers: int, seconds: float, plain_s: float
    ) -> None:
        """Count a round of `n_answers` answers without prefill. A plain round, with one token for each
        answer, would have taken `plain_s`."""
        n_tokens = sum(len(event.pieces) for event in events if isinstance(event, CommittedEvent))
        self._round_s += seconds
        self._plain_s += plain_s * n_tokens / n_answers
        self._gain.set(self._plain_s / self._round_s)

    def count_times(self, told: Sequence[tuple[int, Event | SpecgenError]], seconds: float) -> None:
        """Count the times of answers whose request came `seconds` ago."""
        for _, event in told:
            if isinstance(event, CommittedEvent) and event.n_tokens == len(event.pieces):
                self._first_s.observe(seconds)
            elif isinstance(event, FinishedEvent):
                self._whole_s.observe(seconds)
            elif isinstance(event, SpecgenError):
                self._answers("failed").inc()

    def show_load(self, n_processing: int, n_waiting: int) -> None:
        """Show how many answers are being generated, and how many wait."""
        self._processing.set(n_processing)
        self._deferred.set(n_waiting)
