"""Answers in OpenAI's older form, whole or in chunks, with specgen's own figures."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specgen.events import CommittedEvent, FinishedEvent, Piece, ReasonCount
from specgen.serve.formats.request import Kind
from specgen.serve.formats.tool_calls import AnswerParser, message_of
from specgen.system.machine import is_busy


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: `pieces` are its tokens if log-probabilities are wanted, a new `parser` finds reasoning
    and tool calls in it, and `stop_string` is the one that ended it."""

    finished: FinishedEvent
    pieces: Sequence[Piece] | None = None
    parser: AnswerParser | None = None
    stop_string: str | None = None
    n_reasoning_tokens: int = 0


def completion_body(
    kind: Kind,
    answers: Sequence[Answer],
    *,
    identity: str,
    created: int,
    model: str,
    warnings: Sequence[str] = (),
    n_for_each_prompt: int = 1,
) -> dict[str, Any]:
    """Return the body with answers, which are ordered by prompt: a chat completion, or a text completion.

    `identity` makes its id, and `created` is in seconds since 1970. `warnings` say what of the request was
    ignored."""
    return {
        **_head(kind, identity, created, model),
        "choices": [_choice(kind, number, answer) for number, answer in enumerate(answers)],
        **figures(answers, warnings, n_for_each_prompt),
    }


def _head(
    kind: Kind, identity: str, created: int, model: str, *, is_chunk: bool = False
) -> dict[str, Any]:
    is_text = kind == "completion"
    what = "text_completion" if is_text else "chat.completion"
    return {
        "id": f"{'cmpl' if is_text else 'chatcmpl'}-{identity}",
        "object": f"{what}.chunk" if is_chunk and not is_text else what,
        "created": created,
        "model": model,
    }


def _choice(kind: Kind, number: int, answer: Answer) -> dict[str, Any]:
    finished, stop_string = answer.finished, answer.stop_string
    found: dict[str, Any] = {"index": number}
    if kind == "completion":
        found["text"] = finished.text
    elif answer.parser is not None:
        cut = is_cut(finished, stop_string)
        found["message"] = message_of(answer.parser, finished.text, is_cut=cut)
    else:
        found["message"] = {"role": "assistant", "content": finished.text}
    found["logprobs"] = None if answer.pieces is None else _logprobs(kind, answer.pieces)
    found["finish_reason"] = finish_reason(finished, answer.parser)
    if stop_string is not None:
        found["stop_reason"] = stop_string
    return found


def is_cut(finished: FinishedEvent, stop_string: str | None) -> bool:
    """Return whether an answer ended before the model ended it."""
    return finished.finish_reason != "stop" or stop_string is not None


def finish_reason(finished: FinishedEvent, parser: AnswerParser | None = None) -> str:
    """Return the reason why an answer ended, in OpenAI's words. `parser` has read the whole answer."""
    if finished.finish_reason != "stop":
        return "length"
    return "tool_calls" if parser is not None and parser.n_calls else "stop"


# --- figures --------------------------------------------------------------------------------------


def own_figures(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a body that only specgen has; clients skip fields that they do not know."""
    return {name: body[name] for name in ("speculative", "timings", "warnings") if name in body}


def figures(
    answers: Sequence[Answer], warnings: Sequence[str] = (), n_for_each_prompt: int = 1
) -> dict[str, Any]:
    """Return `usage`, and specgen's own figures.

    In `speculative`, the gain is not known on a busy machine. The names in `timings` are llama.cpp's; `_ms`
    are milliseconds. Answers that share a round have equal parts of its time. `undrafted` says why rounds
    drafted nothing."""
    finished = joined([answer.finished for answer in answers], n_for_each_prompt)
    n_reasoning = sum(answer.n_reasoning_tokens for answer in answers)
    n_prompt, n_cached = finished.n_prompt_tokens, finished.n_cached_tokens
    between = finished.estimated_speedup_range
    if is_busy(finished.others_share):
        between = None
    predicted_s = max(0.0, finished.wall_s - finished.prompt_s)
    n_read = n_prompt - n_cached
    return {
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": finished.n_tokens,
            "total_tokens": n_prompt + finished.n_tokens,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        },
        "speculative": {
            "n_rounds": finished.n_rounds,
            "n_drafted": finished.n_drafted,
            "n_accepted": finished.n_accepted,
            "acceptance_rate": finished.acceptance_rate,
            "mean_accepted_length": finished.mean_accepted_length,
            "estimated_speedup": None if between is None else finished.estimated_speedup,
            "estimated_speedup_range": None if between is None else list(between),
            "drafted_by_position": list(finished.drafted_by_depth),
            "accepted_by_position": list(finished.accepted_by_depth),
        },
        "timings": {
            "cache_n": n_cached,
            "prompt_n": n_read,
            "prompt_ms": 1000.0 * finished.prompt_s,
            "prompt_per_second": n_read / finished.prompt_s if finished.prompt_s > 0.0 else None,
            "predicted_n": finished.n_tokens,
            "predicted_ms": 1000.0 * predicted_s,
            "predicted_per_second": finished.tokens_per_s,
            "draft_n": finished.n_drafted,
            "draft_n_accepted": finished.n_accepted,
            "undrafted": [asdict(each) for each in finished.undrafted],
        },
        **({"warnings": list(warnings)} if warnings else {}),
    }


def joined(answers: Sequence[FinishedEvent], n_for_each_prompt: int) -> FinishedEvent:
    """Return the figures of several answers, which are ordered by prompt, as those of one. The tokens of a
    prompt count once; times and counts of drafts are sums. The gain of several is not estimated."""
    first = answers[0]
    if len(answers) == 1:
        return first
    names = ("n_tokens", "n_rounds", "n_drafted", "n_accepted", "prompt_s", "wall_s")
    sums = {name: sum(getattr(each, name) for each in answers) for name in names}
    prompts = answers[::n_for_each_prompt]
    predicted_s = sums["wall_s"] - sums["prompt_s"]
    n_kept = sum(each.n_rounds * (each.mean_accepted_length or 0.0) for each in answers)
    n_drafted, n_rounds = sums["n_drafted"], sums["n_rounds"]
    return replace(
        first,
        **sums,
        n_prompt_tokens=sum(each.n_prompt_tokens for each in prompts),
        n_cached_tokens=sum(each.n_cached_tokens for each in prompts),
        tokens_per_s=sums["n_tokens"] / predicted_s if predicted_s > 0.0 else None,
        acceptance_rate=sums["n_accepted"] / n_drafted if n_drafted else None,
        mean_accepted_length=n_kept / n_rounds if n_rounds else None,
        accepted_by_depth=_sums([each.accepted_by_depth for each in answers]),
        drafted_by_depth=_sums([each.drafted_by_depth for each in answers]),
        undrafted=_reasons(itertools.chain.from_iterable(each.undrafted for each in answers)),
        estimated_speedup=None,
        estimated_speedup_range=None,
    )


def _sums(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _reasons(counts: itertools.chain[ReasonCount]) -> tuple[ReasonCount, ...]:
    """Return one count for each reason, the most frequent first."""
    found: dict[str, ReasonCount] = {}
    for each in counts:
        before = found[each.reason].n_rounds if each.reason in found else 0
        found[each.reason] = replace(each, n_rounds=before + each.n_rounds)
    return tuple(sorted(found.values(), key=lambda each: -each.n_rounds))


# --- log-probabilities ----------------------------------------------------------------------------


def _logprobs(kind: Kind, pieces: Sequence[Piece], start: int = 0) -> dict[str, Any]:
    """Return the log-probabilities of the tokens that the target chose; forced tokens have none. A chat has
    an entry for each; a completion has lists, with the offset of each token in the text, of which `start`
    characters come before these tokens."""
    offsets = itertools.accumulate((len(piece.text) for piece in pieces), initial=start)
    known = [
        (piece, piece.logprob, offset)
        for piece, offset in zip(pieces, offsets, strict=False)
        if piece.logprob is not None
    ]
    if kind == "completion":
        return {
            "tokens": [piece.text for piece, *_ in known],
            "token_logprobs": [logprob for _, logprob, _ in known],
            "top_logprobs": [
                {top.text: top.logprob for top in piece.top_logprobs} for piece, *_ in known
            ],
            "text_offset": [offset for *_, offset in known],
        }
    return {
        "content": [
            {
                **_entry(piece.text, logprob),
                "top_logprobs": [_entry(top.text, top.logprob) for top in piece.top_logprobs],
            }
            for piece, logprob, _ in known
        ]
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


# --- streams --------------------------------------------------------------------------------------


class ChunkWriter:
    """Makes the chunks of one response, whose answers are numbered from 0.

    `identity` makes its id; `created` is in seconds since 1970. With `has_pieces`, each chunk says where its
    tokens come from.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        identity: str,
        created: int,
        model: str,
        has_logprobs: bool,
        has_pieces: bool,
    ) -> None:
        self._kind = kind
        self._head = _head(kind, identity, created, model, is_chunk=True)
        self._has_logprobs = has_logprobs
        self._has_pieces = has_pieces
        #: Characters of each answer so far.
        self._n_written: defaultdict[int, int] = defaultdict(int)

    def first(self, number: int) -> list[dict[str, Any]]:
        """Return the first chunk of an answer, with the role, in a chat; none in a completion."""
        is_text = self._kind == "completion"
        return [] if is_text else [self.delta(number, {"role": "assistant", "content": ""})]

    def text(
        self, number: int, event: CommittedEvent, deltas: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Return the chunks for tokens of an answer; none while none of their text can be shown. A chat's
        `deltas` replace the text if there is more than text."""
        start = self._n_written[number]
        self._n_written[number] += len(event.text)
        if deltas is None:
            deltas = [{"content": event.text}] if event.text or self._has_logprobs else []
        chunks = [self.delta(number, delta) for delta in deltas]
        if self._has_logprobs or self._has_pieces:
            chunks = chunks or [self.delta(number, {})]
        if self._has_logprobs:
            chunks[0]["choices"][0]["logprobs"] = _logprobs(self._kind, event.pieces, start)
        if self._has_pieces:
            chunks[0]["pieces"] = [
                {"text": piece.text, "kind": piece.kind, "origin": piece.origin}
                for piece in event.pieces
            ]
        return chunks

    def last(
        self, number: int, finish_reason: str, stop_string: str | None, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the last chunk of an answer: the finish reason, the stop string that ended the answer, and
        `more` beside the choice."""
        chunk = self.delta(number, {}, finish_reason)
        if stop_string is not None:
            chunk["choices"][0]["stop_reason"] = stop_string
        return {**chunk, **more}

    def without_choice(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk about all answers."""
        return {**self._head, "choices": [], **more}

    def delta(
        self, number: int, delta: Mapping[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        """Return a chunk that adds `delta` to an answer."""
        chosen: dict[str, Any] = {"index": number}
        if self._kind == "completion":
            chosen["text"] = delta.get("content", "")
        else:
            chosen["delta"] = delta
        chosen |= {"logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [chosen]}


class InfillWriter:
    """Writes an answer in the form of llama.cpp's server, for a text with a gap."""

    def __init__(self, _identity: str, _created: int, _model: str) -> None:
        pass

    def begin(self, _n_prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events before the answer: none."""
        return []

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk of a completion, or for the body of an error."""
        return [dict(chunk) if "error" in chunk else self.whole(chunk)]

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer from the body of a completion, or a part of it from a chunk."""
        (choice,) = body["choices"]
        reason = choice["finish_reason"]
        found = {
            "index": 0,
            "content": choice["text"],
            "stop": reason is not None,
            "model": body["model"],
        }
        if reason is not None:
            usage = body["usage"]
            found |= {
                "stop_type": "eos" if reason == "stop" else "limit",
                "truncated": False,
                "tokens_predicted": usage["completion_tokens"],
                "tokens_evaluated": usage["prompt_tokens"],
                "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
                "timings": body["timings"],
                "speculative": body["speculative"],
            }
        return found | {name: body[name] for name in ("pieces",) if name in body}
