"""Figures of a server in Prometheus's format, with the names of llama.cpp's server and vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from specgen.errors import SpecgenError
from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    PrefillEvent,
    VerifiedEvent,
)

#: Counters that add up a field of finished answers: name, field, help.
_SUMS = (
    ("prompt_tokens_cached", "n_cached_tokens", "Tokens of prompts that were in the cache."),
    ("tokens_predicted", "n_tokens", "Tokens of answers."),
    ("draft_seconds", "draft_s", "Time in decodes of the draft model."),
    ("target_seconds", "target_s", "Time in decodes of the target, prompts included."),
    ("prompt_seconds", "prompt_s", "Time in decodes of prompts."),
    ("loop_seconds", "loop_s", "Time of specgen itself."),
)
_DRAFTS = "spec_decode_num"
#: The other counters of a model: name, help, and a label in addition to the model's name.
_COUNTERS = (
    ("prompt_tokens", "Tokens of prompts as they are read, cached ones included.", ""),
    (f"{_DRAFTS}_drafts", "Drafts that the target verified.", ""),
    (f"{_DRAFTS}_draft_tokens", "Tokens of these drafts.", ""),
    (f"{_DRAFTS}_accepted_tokens", "Tokens of drafts that were accepted.", ""),
    (f"{_DRAFTS}_accepted_tokens_per_pos", "The same by their position.", "position"),
    (f"{_DRAFTS}_wasted_tokens", "Drafted tokens that were verified in vain.", ""),
    ("prefix_cache_hits", "Prompts that began with cached tokens.", ""),
    ("answers", "Answers by how they ended.", "finish_reason"),
    ("model_loads", "Number of times the model was loaded.", ""),
)
#: Names that vLLM has for some of these counters; its benchmarks look for nothing else.
_VLLM_NAMES = {
    f"{_DRAFTS}_drafts": "vllm:spec_decode_num_drafts",
    f"{_DRAFTS}_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    f"{_DRAFTS}_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    f"{_DRAFTS}_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
_GAUGES = (
    ("estimated_gain", "How many times as fast as plain decoding, by measured costs."),
    ("requests_processing", "Answers in the making."),
    ("requests_deferred", "Answers that wait for a free slot."),
    ("slots", "Answers at once, at most; 0 if the model is not loaded."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request to an answer's first token."),
    ("answer_seconds", "From a request to the end of an answer."),
)
#: The upper ends of the histograms' buckets, in seconds.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ServerMetrics:
    """The figures of a server: its responses, and those of each model."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "specgen:responses",
            "Responses by their status.",
            ["status"],
            registry=self._registry,
        )
        #: The counters, gauges and histograms, by their names without the prefix.
        self.figures: dict[str, Any] = {}
        for name, _, text in _SUMS:
            self._add(Counter, name, text)
        for name, text, label in _COUNTERS:
            self._add(Counter, name, text, label)
        for name, text in _GAUGES:
            self._add(Gauge, name, text)
        for name, text in _HISTOGRAMS:
            self._add(Histogram, name, text, buckets=_BUCKETS)
        for name, vllm_name in _VLLM_NAMES.items():
            self._registry.register(_VllmCounter(self.figures[name], vllm_name))

    def _add(
        self,
        kind: Any,
        name: str,
        text: str,
        label: str = "",
        **settings: Any,
    ) -> None:
        """Add a figure of all models.

        Args:
            kind: The class of prometheus_client: `Counter`, `Gauge` or `Histogram`.
            name: The name without the prefix.
            text: The help.
            label: A label in addition to the model's name.
            settings: Further arguments of `kind`.
        """
        labels = ["model"]
        if label:
            labels.append(label)
        figure = kind(f"specgen:{name}", text, labels, registry=self._registry, **settings)
        self.figures[name] = figure

    def count_response(self, status: int) -> None:
        """Count a response by its HTTP status."""
        self._responses.labels(status).inc()

    def text(self) -> bytes:
        """Return all figures in Prometheus's format."""
        return generate_latest(self._registry)


class _VllmCounter(Collector):
    """A counter once more, under the name and with the labels that it has in vLLM."""

    def __init__(self, counter: Counter, name: str) -> None:
        self._counter = counter
        self._name = name

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter with its value of now."""
        for family in self._counter.collect():
            copy = CounterMetricFamily(self._name, family.documentation)
            for sample in family.samples:
                labels = {"engine": "0", **sample.labels}
                labels["model_name"] = labels.pop("model")
                copy.add_sample(f"{self._name}_total", labels, sample.value)
            yield copy


class Metrics:
    """Counts the work of a model, over all of its loads. May be used from several threads."""

    def __init__(self, server: ServerMetrics, model: str) -> None:
        self.model = model
        self._figures = server.figures
        #: The time of all rounds without prefill.
        self._round_s = 0.0
        #: The time that plain decoding would have taken for the tokens of these rounds.
        self._plain_s = 0.0
        #: The number of prompt tokens that were already counted, by the number of an unfinished
        #: answer.
        self._n_counted: dict[int, int] = {}
        # Make every figure without further labels appear with the value 0.
        labelled_names = {name for name, _, label in _COUNTERS if label}
        for name in self._figures.keys() - labelled_names:
            self._figure(name)

    def _figure(self, name: str, *labels: object) -> Any:
        return self._figures[name].labels(self.model, *labels)

    def show_slots(self, n_slots: int) -> None:
        """Show that the model was loaded, or with 0 slots that it was unloaded."""
        self._n_counted.clear()
        self._figure("slots").set(n_slots)
        if n_slots > 0:
            self._figure("model_loads").inc()

    def show_load(self, n_open: int, n_parallel: int) -> None:
        """Show the number of answers that are generated, and the number of those that wait.

        Args:
            n_open: The number of both.
            n_parallel: The maximum number of answers that are generated at once.
        """
        self._figure("requests_processing").set(min(n_open, n_parallel))
        self._figure("requests_deferred").set(max(0, n_open - n_parallel))

    def count_events(self, events: Iterable[Event]) -> None:
        """Count drafts, prompts and finished answers."""
        n_drafted: dict[int, int] = {}  # by the answer's number
        for event in events:
            match event:
                case DraftedEvent():
                    n_drafted[event.sequence] = len(event.nodes)
                case VerifiedEvent():
                    n_accepted = len(event.accepted)
                    self._count_draft(n_drafted.get(event.sequence, 0), n_accepted)
                case PrefillEvent():
                    self._count_prompt(event.sequence, event.n_prefilled)
                case FinishedEvent():
                    self._count_answer(event)

    def _count_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft that was verified."""
        self._figure(f"{_DRAFTS}_drafts").inc()
        self._figure(f"{_DRAFTS}_draft_tokens").inc(n_drafted)
        self._figure(f"{_DRAFTS}_accepted_tokens").inc(n_accepted)
        self._figure(f"{_DRAFTS}_wasted_tokens").inc(n_drafted - n_accepted)
        for position in range(n_accepted):
            self._figure(f"{_DRAFTS}_accepted_tokens_per_pos", position).inc()

    def _count_answer(self, event: FinishedEvent) -> None:
        """Count a finished answer, and the rest of its prompt."""
        self._figure("answers", event.finish_reason).inc()
        if event.n_cached_tokens > 0:
            self._figure("prefix_cache_hits").inc()
        # An answer that was cancelled before its first token may have a part of its prompt left.
        is_prefilled = event.n_tokens > 0 or event.finish_reason != "interrupted"
        if is_prefilled:
            self._count_prompt(event.sequence, event.n_prompt_tokens)
        self._n_counted.pop(event.sequence, None)
        for name, field, _ in _SUMS:
            self._figure(name).inc(getattr(event, field))

    def _count_prompt(self, sequence: int, n_prefilled: int) -> None:
        """Count the tokens of a prompt among its first `n_prefilled` that are not counted yet."""
        self._figure("prompt_tokens").inc(n_prefilled - self._n_counted.get(sequence, 0))
        self._n_counted[sequence] = n_prefilled

    def count_text(self, n_tokens: int, seconds: float) -> None:
        """Count a text that became an embedding."""
        self._figure("prompt_tokens").inc(n_tokens)
        self._figure("prompt_seconds").inc(seconds)

    def count_round(
        self,
        events: Iterable[Event],
        seconds: float,
        plain_token_s: float,
    ) -> None:
        """Count a round without prefill.

        Args:
            events: The events of the round.
            seconds: The time of the round.
            plain_token_s: The estimated seconds per token without drafting.
        """
        n_tokens = sum(len(event.pieces) for event in events if isinstance(event, CommittedEvent))
        self._round_s += seconds
        self._plain_s += plain_token_s * n_tokens
        self._figure("estimated_gain").set(self._plain_s / self._round_s)

    def count_times(
        self, new_events: Sequence[tuple[int, Event | SpecgenError]], seconds: float
    ) -> None:
        """Count the times of first tokens and of ends, and failed answers.

        Args:
            new_events: New events of a request's answers, with the numbers of the answers.
            seconds: The time since the request came.
        """
        for _, event in new_events:
            match event:
                case CommittedEvent():
                    is_first = event.n_tokens == len(event.pieces)
                    if is_first:
                        self._figure("time_to_first_token_seconds").observe(seconds)
                case FinishedEvent():
                    self._figure("answer_seconds").observe(seconds)
                case SpecgenError():
                    self._figure("answers", "failed").inc()
