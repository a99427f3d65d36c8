"""Answers and errors as all APIs share them: a stream of additions, how it ends, and specgen's own
figures.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specgen.errors import BackendError, PromptError, PromptLengthError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, ReadingEvent
from specgen.serve.formats.call_forms import CallForm
from specgen.serve.formats.request import BodyError, Json, Request, with_call_form
from specgen.serve.formats.tool_calls import Delta, Function, ToolCallParser
from specgen.session.prompts import template_of
from specgen.session.prompts.thoughts import ThoughtReader
from specgen.system.machine import is_busy

if TYPE_CHECKING:
    from specgen.llama.model import LlamaModel
    from specgen.llama.vocabulary import LlamaVocabulary

#: OpenAI's types of errors by their status; others are ``invalid_request_error``.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
#: Statuses and codes of specgen's errors; the first match counts.
_CODES: tuple[tuple[type[SpecgenError], int, str | None], ...] = (
    (BodyError, 400, "invalid_value"),
    (PromptLengthError, 400, "context_length_exceeded"),
    (PromptError, 400, "invalid_request"),
    (UsageError, 400, "invalid_request"),
    (BackendError, 500, "backend_error"),
    (SpecgenError, 500, None),
)


@dataclass(eq=False)
class RequestError(Exception):
    """A refused or failed request: the `status` and the content of its body. `param` is the wrong
    field, `code` the kind of error; clients that shorten a prompt read the `figures` of llama.cpp's
    server.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None
    figures: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(error: SpecgenError) -> RequestError:
        """Return the error for a client, 400 or 500, without the hint, which names options of the
        command line.
        """
        status, code = next(each[1:] for each in _CODES if isinstance(error, each[0]))
        found = RequestError(status, error.message, code, getattr(error, "field", None))
        if isinstance(error, PromptLengthError):
            found.figures = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_most}
        return found

    @staticmethod
    def ending() -> RequestError:
        return RequestError(503, "the server ends", "ending")

    @staticmethod
    def queue_full() -> RequestError:
        what = "too many requests are waiting; try again later"
        return RequestError(429, what, "queue_full", headers={"Retry-After": "5"})

    def body(self) -> Json:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.figures}}


def for_model(request: Request, model: LlamaModel) -> Request:
    """Return the request as this model answers it. Raise `BodyError`."""
    template = template_of(model, has_tools=True)
    return _with_biases(
        with_call_form(request, template, model.vocabulary.has_control), model.vocabulary
    )


def _with_biases(request: Request, vocabulary: LlamaVocabulary) -> Request:
    """Return the request with its biases as those of tokens. Raise `BodyError` for a token that is
    not there.
    """
    if request.biases is None:
        return request
    found: list[tuple[int, float]] = []
    for key, bias in request.biases:
        tokens = [key] if isinstance(key, int) else vocabulary.tokenize_inside(key)
        try:
            vocabulary.check(tokens)
        except PromptError as error:
            raise BodyError("logit_bias", error.message) from None
        found += ((token, bias) for token in tokens)
    return replace(request, sampling=replace(request.sampling, logit_bias=tuple(found)))


class CallsInThoughts:
    """Reads thoughts. Some models end their turn with calls before they end their thoughts; so what
    looks like calls is held back, and is a thought if anything follows.
    """

    def __init__(
        self, form: CallForm, functions: Sequence[Function], *, one_only: bool = False
    ) -> None:
        self._make = partial(ToolCallParser, form, functions, is_beginning=False)
        self._parser, self._one_only = self._make(), one_only
        self._begins = {mark[0] for mark in (form.mark, form.inner) if mark}
        self._found, self._held = list[Delta](), ""

    def feed(self, text: str, *, is_over: bool) -> str:
        """Return what is certainly a thought now: all of it if the thoughts are over."""
        told = ""
        for character in text:
            is_plain = not self._held and character not in self._begins
            told += character if is_plain else self._fed(character)
        if is_over:
            told, self._held = told + self._held, ""
        return told

    def _fed(self, character: str) -> str:
        self._held += character
        self._found += self._parser.feed(character)
        kinds = [each.kind for each in self._found]
        n = kinds.index("call") if "call" in kinds else len(kinds)
        told = "".join(each.text for each in self._found[:n])
        self._found = self._found[n:]
        if any(each.kind == "content" and each.text.strip() for each in self._found):
            told, self._parser, self._found = self._held, self._make(), []
        self._held = self._held[len(told) :]
        return told

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """Return the calls at the end of an answer that ends in its thoughts, or else the rest of
        the thoughts.
        """
        found = [each for each in self._found + self._parser.finish() if each.kind != "content"]
        if self._one_only:
            found = [each for each in found if each.number == 0]
        if found and not is_cut:
            return found
        return [Delta("thought", self._held)] if self._held else []


class Answer:
    """One answer to a rendered prompt, in deltas: its thinking block, its content, and its calls of
    tools.
    """

    def __init__(self, request: Request, prompt: str = "") -> None:
        self._request = request
        self._thoughts: ThoughtReader | None = None
        self._calls: ToolCallParser | None = None
        self._early: CallsInThoughts | None = None
        if request.splits_reasoning:
            self._thoughts = ThoughtReader(prompt)
        if (tools := request.tools) is not None and request.call_form is not None:
            form, one_only = request.call_form, not tools.is_parallel
            self._early = CallsInThoughts(form, tools.callable, one_only=one_only)
            self._calls = ToolCallParser(
                form, tools.callable, one_only=one_only, calls_only=tools.must_call
            )
        #: Its thoughts, content and calls, in their order; a call's text is its arguments.
        self.blocks: list[Delta] = []
        self.n_reasoning_tokens = 0
        self.finished: FinishedEvent | None = None

    def feed(self, tokens: Sequence[str]) -> list[Delta]:
        """Add the texts of tokens; return what is certain now."""
        thoughts = self._thoughts
        if thoughts is None:
            return self._add("", "".join(tokens))
        thought = answer = ""
        for token in tokens:
            was_past, was_open = thoughts.is_past, thoughts.is_open
            new_thought, new_answer = thoughts.feed(token)
            thought, answer = thought + new_thought, answer + new_answer
            if not was_past:
                has_none = thoughts.is_past and not was_open
                self.n_reasoning_tokens = 0 if has_none else self.n_reasoning_tokens + 1
        return self._add(thought, answer)

    def finish(self, event: FinishedEvent) -> list[Delta]:
        """End the answer; return the rest. The arguments of a call that was cut have no end."""
        self.finished = event
        is_thinking = self._thoughts is not None and (
            self._thoughts.is_open or self._thoughts.is_past
        )
        # The token that ends an answer is none of its own.
        n_most = event.n_tokens if is_thinking else 0
        self.n_reasoning_tokens = min(self.n_reasoning_tokens, n_most)
        deltas = self._add(*self._thoughts.finish()) if self._thoughts is not None else []
        if self._calls is not None:
            is_cut = event.finish_reason != "stop" or self.stop_string is not None
            rest = [] if self._early is None else self._early.finish(is_cut=is_cut)
            rest += self._calls.finish(is_cut=is_cut)
            deltas += self._merge(rest)
        return deltas

    def _add(self, thought: str, answer: str) -> list[Delta]:
        if self._early is not None and self._thoughts is not None:
            is_over = self._thoughts.is_past
            thought = self._early.feed(thought, is_over=is_over)
            self._early = None if is_over else self._early
        deltas = [Delta("thought", thought)] if thought else []
        if self._calls is not None:
            deltas += self._calls.feed(answer)
        elif answer:
            deltas.append(Delta("content", answer))
        return self._merge(deltas)

    def _merge(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if delta.continues(self.blocks[-1] if self.blocks else None):
                self.blocks[-1] = self.blocks[-1].with_more(delta)
            else:
                self.blocks.append(delta)
        return deltas

    def text(self, kind: Literal["thought", "content"]) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Delta]:
        """The whole calls: nobody can use one that was cut."""
        return [block for block in self.blocks if block.kind == "call" and block.is_end]

    @property
    def stop_string(self) -> str | None:
        stopped_by = None if self.finished is None else self.finished.stopped_by
        return stopped_by if stopped_by in self._request.generation.stop else None

    @property
    def finish_reason(self) -> Literal["length", "stop", "tool_calls"]:
        if self.finished is None or self.finished.finish_reason != "stop":
            return "length"
        return "tool_calls" if self.calls else "stop"


class AnswerWriter(ABC):
    """Writes answers in the form of an API, in chunks and whole: those to the first of the
    `requests` with the first of the `prompts`, then those to the next. `identity` makes the id;
    `created` is in seconds since 1970.
    """

    #: How chunks are streamed: events, events named by `type`, or lines; and what keeps a stream
    #: open.
    form: ClassVar[Literal["events", "named", "lines"]] = "events"
    alive: ClassVar[Json | None] = None

    def __init__(
        self,
        requests: Sequence[Request],
        prompts: Sequence[str],
        *,
        identity: str,
        created: int,
        model: str,
    ) -> None:
        self._first = first = requests[0]
        self._identity, self._created, self._model = identity, created, model
        self._prompts = prompts
        self._answers = [
            Answer(requests[number // first.n], prompt) for number, prompt in enumerate(prompts)
        ]

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return what comes before the answers to a prompt of so many tokens."""
        return []

    def feed(self, number: int, event: Event) -> list[Json]:
        """Return the chunks for an event of an answer. The last chunk of all has the figures."""
        answer = self._answers[number]
        if isinstance(event, CommittedEvent):
            deltas = answer.feed([piece.text for piece in event.pieces])
            return self._add(number, deltas, event)
        if isinstance(event, ReadingEvent):
            return self._read(number, event)
        if isinstance(event, FinishedEvent):
            return [*self._add(number, answer.finish(event), None), *self._end(number)]
        return []

    def is_over(self, number: int, time_s: float) -> bool:
        """Return whether an answer, whose first token is `time_s` old, is long enough."""
        limit_s = self._first.lines_s
        return 0.0 < limit_s < time_s and "\n" in self._answers[number].text("content")

    def _read(self, _number: int, _event: ReadingEvent) -> list[Json]:
        return []

    def fail(self, error: Json) -> list[Json]:
        """Return the last chunks if an answer failed, for the body of an error in OpenAI's form."""
        return [error]

    @abstractmethod
    def whole(self) -> Json:
        """Return the whole response, when all answers are finished."""

    @abstractmethod
    def _add(self, number: int, deltas: list[Delta], event: CommittedEvent | None) -> list[Json]:
        """Return the chunks for additions to an answer, of `event` or of its end."""

    @abstractmethod
    def _end(self, number: int) -> list[Json]:
        """Return the chunks at the end of an answer."""

    def _figures(self, number: int | None = None) -> Json:
        """Return `usage`, and specgen's own figures, with the request's wishes about drafts: of all
        answers, or of one.
        """
        answers = self._answers if number is None else [self._answers[number]]
        finished = [each.finished for each in answers if each.finished is not None]
        n_reasoning = sum(each.n_reasoning_tokens for each in answers)
        found = figures(finished, n_reasoning, self._first.n)
        wish = self._first.speculative
        found["speculative"] |= {"draft": wish.draft, "max": wish.max, "verifier": wish.verifier}
        warnings = [*self._first.warnings]
        for each in finished:
            if each.finish_reason == "context":
                n, n_own = each.n_prompt_tokens, each.n_tokens
                has = f"{n} tokens of the prompt and {n_own} of the answer"
                warnings.append(f"max_tokens: the context is full, with {has}")
        return found | ({"warnings": warnings} if warnings else {})


class BlockWriter(AnswerWriter):
    """Writes one answer, whole or as named events, in blocks one behind the other: thoughts, texts
    and calls.
    """

    form = "named"

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        #: The open block, and those that are closed in the form of the API.
        self._block: Delta | None = None
        self._blocks: list[Json] = []

    def _add(self, _number: int, deltas: list[Delta], _event: CommittedEvent | None) -> list[Json]:
        events: list[Json] = []
        for delta in deltas:
            if self._block is not None and delta.continues(self._block):
                self._block = self._block.with_more(delta)
            else:
                events += self._close()
                self._block = delta
                events += self._opened(delta)
            events += self._added(self._block, delta.text)
            if delta.is_end:
                events += self._close()
        return events

    def _close(self, status: str = "completed") -> list[Json]:
        block, self._block = self._block, None
        return self._closed(block, status) if block is not None else []

    # The events at the beginning of a block, for a text that was added to it, and at its end, which
    # keeps it.

    @abstractmethod
    def _opened(self, block: Delta) -> list[Json]: ...

    @abstractmethod
    def _added(self, block: Delta, text: str) -> list[Json]: ...

    @abstractmethod
    def _closed(self, block: Delta, status: str) -> list[Json]: ...


def figures(
    answers: Sequence[FinishedEvent], n_reasoning: int = 0, n_for_each_prompt: int = 1
) -> Json:
    """Return the figures of answers, ordered by prompt. A prompt's tokens count once; others are
    sums. The gain is known of a single answer on a machine that is not busy. The names in `timings`
    are llama.cpp's, and all are numbers.
    """
    prompts, first = answers[::n_for_each_prompt], answers[0]
    n_prompt = sum(each.n_prompt_tokens for each in prompts)
    n_cached = sum(each.n_cached_tokens for each in prompts)

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in answers)

    n_tokens, n_rounds, prompt_s = total("n_tokens"), total("n_rounds"), total("prompt_s")
    n_drafted, n_accepted = total("n_drafted"), total("n_accepted")
    predicted_s = max(0.0, total("wall_s") - prompt_s)
    n_kept = sum(each.n_rounds * (each.mean_accepted_length or 0.0) for each in answers)
    between, tokens_per_s = first.estimated_speedup_range, first.tokens_per_s
    if len(answers) > 1:
        between, tokens_per_s = None, _rate(n_tokens, predicted_s)
    if is_busy(first.others_share):
        between = None
    by_position = _sums([each.drafted_by_depth for each in answers])
    undrafted: Counter[tuple[str, str]] = Counter()
    for count in itertools.chain.from_iterable(each.undrafted for each in answers):
        undrafted[count.reason, count.text] += count.n_rounds
    return {
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        },
        "speculative": {
            "n_rounds": n_rounds,
            "n_drafted": n_drafted,
            "n_accepted": n_accepted,
            "acceptance_rate": _rate(n_accepted, sum(by_position)),
            "mean_accepted_length": _rate(n_kept, n_rounds),
            "estimated_speedup": None if between is None else first.estimated_speedup,
            "estimated_speedup_range": None if between is None else list(between),
            "drafted_by_position": by_position,
            "accepted_by_position": _sums([each.accepted_by_depth for each in answers]),
            "undrafted": [
                {"reason": reason, "text": text, "n_rounds": n}
                for (reason, text), n in undrafted.most_common()
            ],
        },
        "timings": {
            "cache_n": n_cached,
            "prompt_n": n_prompt - n_cached,
            "prompt_ms": 1000.0 * prompt_s,
            "prompt_per_token_ms": _rate(1000.0 * prompt_s, n_prompt - n_cached) or 0.0,
            "prompt_per_second": _rate(n_prompt - n_cached, prompt_s) or 0.0,
            "predicted_n": n_tokens,
            "predicted_ms": 1000.0 * predicted_s,
            "predicted_per_token_ms": _rate(1000.0 * predicted_s, n_tokens) or 0.0,
            "predicted_per_second": tokens_per_s or 0.0,
            "draft_n": n_drafted,
            "draft_n_accepted": n_accepted,
        },
    }


def own_figures(found: Mapping[str, Any]) -> Json:
    """Return the figures that only specgen has; clients skip fields that they do not know."""
    return {name: value for name, value in found.items() if name != "usage"}


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _rate(n: float, of: float) -> float | None:
    return n / of if of > 0 else None
