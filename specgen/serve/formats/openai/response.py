"""The body of an answer in the form of OpenAI's API, with specgen's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specgen.events import FinishedEvent, Piece
from specgen.serve.formats.openai.answer_parser import AnswerParser, message_of
from specgen.serve.formats.openai.request import Kind
from specgen.system.machine import is_busy


def completion_body(
    kind: Kind,
    finished: FinishedEvent,
    pieces: Sequence[Piece],
    *,
    identity: str,
    created: int,
    model: str,
    has_logprobs: bool,
    parser: AnswerParser | None = None,
    n_reasoning_tokens: int = 0,
    warnings: Sequence[str] = (),
    stop_string: str | None = None,
) -> dict[str, Any]:
    """Return the body for a finished answer: a chat completion, or a text completion.

    `identity` makes its id, and `created` is in seconds since 1970. `pieces` are the answer's tokens, used
    only for their log-probabilities. A new `parser` finds reasoning and tool calls. `warnings` say what of
    the request was ignored. `stop_string` is the one that ended the answer."""
    is_text = kind == "completion"
    choice: dict[str, Any] = {"index": 0}
    if is_text:
        choice["text"] = finished.text
    elif parser is not None:
        choice["message"] = message_of(parser, finished.text, is_cut=is_cut(finished, stop_string))
    else:
        choice["message"] = {"role": "assistant", "content": finished.text}
    logprobs = None
    if has_logprobs:
        logprobs = text_logprobs(pieces) if is_text else chat_logprobs(pieces)
    choice["logprobs"] = logprobs
    choice["finish_reason"] = finish_reason(finished, parser)
    if stop_string is not None:
        choice["stop_reason"] = stop_string
    return {
        "id": f"{'cmpl' if is_text else 'chatcmpl'}-{identity}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(finished, n_reasoning_tokens),
        "speculative": speculative_figures(finished),
        "timings": timings(finished),
        **({"warnings": list(warnings)} if warnings else {}),
    }


def usage(finished: FinishedEvent, n_reasoning: int) -> dict[str, Any]:
    """Return the numbers of tokens: read, of these cached, written, and of these reasoning."""
    n_prompt, n_answer = finished.n_prompt_tokens, finished.n_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": finished.n_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def is_cut(finished: FinishedEvent, stop_string: str | None) -> bool:
    """Return whether an answer ended before the model ended it."""
    return finished.finish_reason != "stop" or stop_string is not None


def finish_reason(finished: FinishedEvent, parser: AnswerParser | None = None) -> str:
    """Return the reason why an answer ended, in OpenAI's words. `parser` has read the whole answer."""
    if finished.finish_reason != "stop":
        return "length"
    return "tool_calls" if parser is not None and parser.n_calls else "stop"


def speculative_figures(finished: FinishedEvent) -> dict[str, Any]:
    """Return the counts of drafted and accepted tokens of an answer. On a busy machine the gain is not known."""
    is_known = not is_busy(finished.others_share)
    between = finished.estimated_speedup_range if is_known else None
    return {
        "n_rounds": finished.n_rounds,
        "n_drafted": finished.n_drafted,
        "n_accepted": finished.n_accepted,
        "acceptance_rate": finished.acceptance_rate,
        "mean_accepted_length": finished.mean_accepted_length,
        "estimated_speedup": finished.estimated_speedup if is_known else None,
        "estimated_speedup_range": None if between is None else list(between),
        "drafted_by_position": list(finished.drafted_by_depth),
        "accepted_by_position": list(finished.accepted_by_depth),
    }


def timings(finished: FinishedEvent) -> dict[str, Any]:
    """Return the times of an answer under llama.cpp's names; `_ms` are milliseconds. Answers that share a
    round have equal parts of its time. `undrafted` is specgen's own: why rounds drafted nothing."""
    n_read = finished.n_prompt_tokens - finished.n_cached_tokens
    predicted_s = max(0.0, finished.wall_s - finished.prompt_s)
    return {
        "cache_n": finished.n_cached_tokens,
        "prompt_n": n_read,
        "prompt_ms": 1000.0 * finished.prompt_s,
        "prompt_per_second": n_read / finished.prompt_s if finished.prompt_s > 0.0 else None,
        "predicted_n": finished.n_tokens,
        "predicted_ms": 1000.0 * predicted_s,
        "predicted_per_second": finished.tokens_per_s,
        "draft_n": finished.n_drafted,
        "draft_n_accepted": finished.n_accepted,
        "undrafted": [asdict(each) for each in finished.undrafted],
    }


def chat_logprobs(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the log-probabilities of a chat: an entry for each token that the target chose; forced tokens
    have none."""
    return {
        "content": [
            {
                **_entry(piece.text, piece.logprob),
                "top_logprobs": [_entry(top.text, top.logprob) for top in piece.top_logprobs],
            }
            for piece in pieces
            if piece.logprob is not None
        ]
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def text_logprobs(pieces: Sequence[Piece], start: int = 0) -> dict[str, Any]:
    """Return the log-probabilities of a completion: lists, with the offset of each token in the text. `start`
    characters come before these tokens."""
    known = [piece for piece in pieces if piece.logprob is not None]
    offsets, place = [], start
    for piece in pieces:
        if piece.logprob is not None:
            offsets.append(place)
        place += len(piece.text)
    return {
        "tokens": [piece.text for piece in known],
        "token_logprobs": [piece.logprob for piece in known],
        "top_logprobs": [{top.text: top.logprob for top in piece.top_logprobs} for piece in known],
        "text_offset": offsets,
    }
