"""The body of an answer, as OpenAI's API has it, with specgen's own figures beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgen.events import FinishedEvent, Piece
from specgen.openai_format.request import Kind


def completion_body(
    kind: Kind,
    finished: FinishedEvent,
    pieces: Sequence[Piece],
    *,
    identity: str,
    created: int,
    model: str,
    has_logprobs: bool,
) -> dict[str, Any]:
    """The body for a finished answer: a chat completion, or the text completion of a text that was
    continued. `identity` makes its id, `created` are seconds since 1970, `pieces` the answer's tokens,
    which are only looked at for their log-probabilities."""
    is_text = kind == "completion"
    choice: dict[str, Any] = {"index": 0}
    if is_text:
        choice["text"] = finished.text
    else:
        choice["message"] = {"role": "assistant", "content": finished.text}
    logprobs = None
    if has_logprobs:
        logprobs = _of_text(pieces) if is_text else {"content": _of_chat(pieces)}
    choice["logprobs"] = logprobs
    choice["finish_reason"] = "stop" if finished.finish_reason == "stop" else "length"
    return {
        "id": f"{'cmpl' if is_text else 'chatcmpl'}-{identity}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": finished.n_prompt_tokens,
            "completion_tokens": finished.n_tokens,
            "total_tokens": finished.n_prompt_tokens + finished.n_tokens,
            "prompt_tokens_details": {"cached_tokens": finished.n_cached_tokens},
        },
        "speculative": speculative_figures(finished),
        "timings": timings(finished),
    }


def speculative_figures(finished: FinishedEvent) -> dict[str, Any]:
    """What drafting did for an answer."""
    return {
        "n_rounds": finished.n_rounds,
        "n_drafted": finished.n_drafted,
        "n_accepted": finished.n_accepted,
        "acceptance_rate": finished.acceptance_rate,
        "mean_accepted_length": finished.mean_accepted_length,
    }


def timings(finished: FinishedEvent) -> dict[str, Any]:
    """The times of an answer by llama.cpp's names; `_ms` are milliseconds. Beside other answers they
    are of rounds that all of them share."""
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
    }


def _of_chat(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """An entry for each token that the target chose; forced tokens have no probability."""
    return [
        {
            **_entry(piece.text, piece.logprob),
            "top_logprobs": [_entry(top.text, top.logprob) for top in piece.top_logprobs],
        }
        for piece in pieces
        if piece.logprob is not None
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def _of_text(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The same as lists, one behind the other, and where each token begins in the text."""
    known = [piece for piece in pieces if piece.logprob is not None]
    offsets, place = [], 0
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


__all__ = ["completion_body", "speculative_figures", "timings"]
