"""Answers of OpenAI's chat and text completions, whole or in chunks, with specgen's own figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.events import CommittedEvent, Event, FinishedEvent, Piece
from specgen.serve.formats.request import Request
from specgen.serve.formats.tool_calls import AnswerParser, Delta, message_of
from specgen.system.machine import is_busy

Chunk = dict[str, Any]


@dataclass(slots=True)
class _Answer:
    """What there is of one answer."""

    request: Request
    parser: AnswerParser
    deltas: list[Delta] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    n_characters: int = 0
    finished: FinishedEvent | None = None

    def finish(self, event: FinishedEvent) -> list[Delta]:
        """End the answer; return the rest of its text."""
        self.finished = event
        is_cut = event.finish_reason != "stop" or self.request.stop_string(event) is not None
        return self.parser.finish(is_cut=is_cut)

    @property
    def ending(self) -> dict[str, Any]:
        if self.finished is None or self.finished.finish_reason != "stop":
            return {"finish_reason": "length"}
        if self.parser.n_calls:
            return {"finish_reason": "tool_calls"}
        stop = self.request.stop_string(self.finished)
        return {"finish_reason": "stop"} | ({} if stop is None else {"stop_reason": stop})


class ChatWriter:
    """Makes a chat completion or a text completion, in chunks and whole, from the events of its answers: those
    to the first of the `requests` with the first of the rendered `prompts`, then those to the next.

    `identity` makes its id; `created` is in seconds since 1970.
    """

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
        self._has_logprobs = first.generation.logprobs is not None
        asked = [requests[number // first.n] for number in range(len(prompts))]
        self._answers = [
            _Answer(request, request.parser(prompt))
            for request, prompt in zip(asked, prompts, strict=True)
        ]
        self._is_text = first.kind == "completion"
        self._head = {
            "id": f"{'cmpl' if self._is_text else 'chatcmpl'}-{identity}",
            "object": "text_completion" if self._is_text else "chat.completion",
            "created": created,
            "model": model,
        }

    def begin(self) -> list[Chunk]:
        """Return the first chunk of each answer, with the role, in a chat."""
        head = {"role": "assistant", "content": ""}
        numbers = () if self._is_text else range(len(self._answers))
        return [self._chunk(number, head) for number in numbers]

    def feed(self, number: int, event: Event) -> list[Chunk]:
        """Return the chunks for an event of an answer. The last chunk of all has the figures."""
        if isinstance(event, CommittedEvent):
            return self._committed(number, event)
        return self._finished(number, event) if isinstance(event, FinishedEvent) else []

    def whole(self) -> dict[str, Any]:
        """Return the whole response, when all answers are finished."""
        choices = []
        for number, answer in enumerate(self._answers):
            message = message_of(answer.deltas)
            said = {"text": message["content"]} if self._is_text else {"message": message}
            logprobs = answer.logprobs if self._has_logprobs else None
            choices.append({"index": number, **said, "logprobs": logprobs, **answer.ending})
        return {**self._head, "choices": choices, **self._figures()}

    def _committed(self, number: int, event: CommittedEvent) -> list[Chunk]:
        answer, has_pieces = self._answers[number], self._first.speculative.pieces
        deltas = answer.parser.feed([piece.text for piece in event.pieces])
        chunks = self._add(number, deltas)
        if self._has_logprobs or has_pieces:
            chunks = chunks or [self._chunk(number, {})]
        if self._has_logprobs:
            logprobs = _logprobs(event.pieces, answer.n_characters if self._is_text else None)
            chunks[0]["choices"][0]["logprobs"] = logprobs
            for name, values in logprobs.items():
                answer.logprobs.setdefault(name, []).extend(values)
        if has_pieces:
            chunks[0]["pieces"] = [
                {"text": piece.text, "kind": piece.kind, "origin": piece.origin}
                for piece in event.pieces
            ]
        answer.n_characters += len(event.text)
        return chunks

    def _finished(self, number: int, event: FinishedEvent) -> list[Chunk]:
        answer = self._answers[number]
        chunks = self._add(number, answer.finish(event))
        chunks.append(self._chunk(number, {}, answer.ending))
        if all(each.finished is not None for each in self._answers):
            if self._first.has_usage_alone:
                chunks.append({**chunks[-1], "choices": []})
            chunks[-1] |= self._figures()
        return chunks

    def _add(self, number: int, deltas: list[Delta]) -> list[Chunk]:
        self._answers[number].deltas += deltas
        return [self._chunk(number, delta) for delta in deltas]

    def _chunk(self, number: int, delta: Delta, ending: dict[str, Any] | None = None) -> Chunk:
        said = {"text": delta.get("content", "")} if self._is_text else {"delta": delta}
        choice = {"index": number, **said, "logprobs": None, "finish_reason": None}
        suffix = "" if self._is_text else ".chunk"
        head = {**self._head, "object": f"{self._head['object']}{suffix}"}
        return {**head, "choices": [choice | (ending or {})]}

    def _figures(self) -> dict[str, Any]:
        """Return `usage`, and specgen's own figures, with the request's wishes about drafts."""
        finished = [each.finished for each in self._answers if each.finished is not None]
        n_reasoning = sum(each.parser.n_reasoning_tokens for each in self._answers)
        found = figures(finished, n_reasoning, self._first.n)
        wish = self._first.speculative
        echo = {"draft": wish.draft, "max": wish.max, "verifier": wish.verifier}
        found["speculative"] = echo | found["speculative"]
        warnings = self._first.warnings
        return found | ({"warnings": list(warnings)} if warnings else {})


# --- figures --------------------------------------------------------------------------------------


def own_figures(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a body that only specgen has; clients skip fields that they do not know."""
    return {name: body[name] for name in ("speculative", "timings", "warnings") if name in body}


def figures(
    answers: Sequence[FinishedEvent], n_reasoning: int = 0, n_for_each_prompt: int = 1
) -> dict[str, Any]:
    """Return the figures of answers, which are ordered by prompt. The tokens of a prompt count once; times
    and counts of drafts are sums.

    In `speculative`, the gain is known of a single answer on a machine that is not busy. The names in `timings`
    are llama.cpp's; `_ms` are milliseconds. `undrafted` says why rounds drafted nothing."""
    prompts, first = answers[::n_for_each_prompt], answers[0]
    n_prompt = sum(each.n_prompt_tokens for each in prompts)
    n_cached = sum(each.n_cached_tokens for each in prompts)
    n_tokens, n_rounds = _sum(answers, "n_tokens"), _sum(answers, "n_rounds")
    n_drafted, n_accepted = _sum(answers, "n_drafted"), _sum(answers, "n_accepted")
    prompt_s = _sum(answers, "prompt_s")
    predicted_s = max(0.0, _sum(answers, "wall_s") - prompt_s)
    is_single = len(answers) == 1
    n_kept = sum(each.n_rounds * (each.mean_accepted_length or 0.0) for each in answers)
    between = first.estimated_speedup_range if is_single else None
    if is_busy(first.others_share):
        between = None
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
            "acceptance_rate": _rate(n_accepted, n_drafted),
            "mean_accepted_length": _rate(n_kept, n_rounds),
            "estimated_speedup": None if between is None else first.estimated_speedup,
            "estimated_speedup_range": None if between is None else list(between),
            "drafted_by_position": _sums([each.drafted_by_depth for each in answers]),
            "accepted_by_position": _sums([each.accepted_by_depth for each in answers]),
        },
        "timings": {
            "cache_n": n_cached,
            "prompt_n": n_prompt - n_cached,
            "prompt_ms": 1000.0 * prompt_s,
            "prompt_per_second": _rate(n_prompt - n_cached, prompt_s),
            "predicted_n": n_tokens,
            "predicted_ms": 1000.0 * predicted_s,
            "predicted_per_second": (
                first.tokens_per_s if is_single else _rate(n_tokens, predicted_s)
            ),
            "draft_n": n_drafted,
            "draft_n_accepted": n_accepted,
            "undrafted": [
                {"reason": reason, "text": text, "n_rounds": n}
                for (reason, text), n in undrafted.most_common()
            ],
        },
    }


def _sum(answers: Sequence[FinishedEvent], name: str) -> Any:
    return sum(getattr(each, name) for each in answers)


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _rate(n: float, of: float) -> float | None:
    return n / of if of > 0 else None


# --- log-probabilities ----------------------------------------------------------------------------


def _logprobs(pieces: Sequence[Piece], start: int | None) -> dict[str, list[Any]]:
    """Return the log-probabilities of the tokens that the target chose; forced tokens have none. A chat has
    an entry for each; a completion has lists, with the offset of each token in the text, of which `start`
    characters come before these tokens."""
    offsets = itertools.accumulate((len(piece.text) for piece in pieces), initial=start or 0)
    known = [
        (piece, piece.logprob, offset)
        for piece, offset in zip(pieces, offsets, strict=False)
        if piece.logprob is not None
    ]
    if start is not None:
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


class InfillWriter:
    """Writes an answer in the form of llama.cpp's server, for a text with a gap."""

    def __init__(self, _identity: str, _created: int, _model: str) -> None:
        pass

    def begin(self, _n_prompt_tokens: int) -> list[dict[str, Any]]:
        return []

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(chunk) if "error" in chunk else self.whole(chunk)]

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
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
