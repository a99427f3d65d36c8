"""Merges several answers of a request into one body."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

_NO_GAIN = {"estimated_speedup": None, "estimated_speedup_range": None}


def merged_bodies(bodies: Sequence[dict[str, Any]], n_for_each_prompt: int) -> dict[str, Any]:
    """Return the body of a response with the answers of all bodies, which are ordered by prompt. The tokens
    of a prompt count once; times and counts of drafts are sums."""
    first = bodies[0]
    if len(bodies) == 1:
        return first
    choices = [{**body["choices"][0], "index": number} for number, body in enumerate(bodies)]
    return {**first, "choices": choices, **merged_figures(bodies, n_for_each_prompt)}


def merged_figures(bodies: Sequence[dict[str, Any]], n_for_each_prompt: int) -> dict[str, Any]:
    """Return the common `usage`, `speculative`, `timings` and `warnings` of all bodies."""
    own_prompts = bodies[::n_for_each_prompt]
    usage = {
        "prompt_tokens": sum(body["usage"]["prompt_tokens"] for body in own_prompts),
        "completion_tokens": sum(body["usage"]["completion_tokens"] for body in bodies),
    }
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in own_prompts]
    reasoning = [body["usage"]["completion_tokens_details"]["reasoning_tokens"] for body in bodies]
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    timings = _sums([{**body["timings"], "undrafted": []} for body in bodies])
    timings["undrafted"] = _sums_of_reasons([body["timings"]["undrafted"] for body in bodies])
    for what in ("prompt", "predicted"):
        milliseconds = timings[f"{what}_ms"]
        per_second = 1000.0 * timings[f"{what}_n"] / milliseconds if milliseconds else None
        timings[f"{what}_per_second"] = per_second
    drafts = _sums([{**body["speculative"], **_NO_GAIN} for body in bodies])
    n_drafted, n_rounds = drafts["n_drafted"], drafts["n_rounds"]
    drafts["acceptance_rate"] = drafts["n_accepted"] / n_drafted if n_drafted else None
    lengths = [body["speculative"]["mean_accepted_length"] for body in bodies]
    rounds = [body["speculative"]["n_rounds"] for body in bodies]
    drafts |= _gain(bodies)
    n_told = sum(n * (length or 0.0) for n, length in zip(rounds, lengths, strict=True))
    drafts["mean_accepted_length"] = n_told / n_rounds if n_rounds else None
    return {
        "usage": {
            **usage,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
            "completion_tokens_details": {"reasoning_tokens": sum(reasoning)},
        },
        "speculative": drafts,
        "timings": timings,
        **({"warnings": bodies[0]["warnings"]} if "warnings" in bodies[0] else {}),
    }


def _gain(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the time that the answers with an estimate would have taken without drafts, over their time, and
    between which two numbers that is."""
    known = [
        (
            body["timings"]["predicted_ms"],
            drafts["estimated_speedup"],
            *drafts["estimated_speedup_range"],
        )
        for body in bodies
        if (drafts := body["speculative"])["estimated_speedup_range"] is not None
    ]
    total_ms = sum(ms for ms, *_ in known)
    if not total_ms:
        return dict(_NO_GAIN)
    speedup, low, high = (
        sum(each[0] * each[index] for each in known) / total_ms for index in (1, 2, 3)
    )
    return {"estimated_speedup": speedup, "estimated_speedup_range": [low, high]}


def _sums(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sums of numbers, and of lists of numbers item by item; other values are those of the first
    part."""
    summed = dict(parts[0])
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, list):
            longest = max(map(len, values))
            padded = [each + [0] * (longest - len(each)) for each in values]
            summed[name] = [sum(column) for column in zip(*padded, strict=True)]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            summed[name] = sum(each or 0 for each in values)
    return summed


def _sums_of_reasons(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one entry for each reason, the most frequent first, with the rounds of all parts."""
    summed: dict[str, dict[str, Any]] = {}
    for each in itertools.chain.from_iterable(parts):
        n_before = summed[each["reason"]]["n_rounds"] if each["reason"] in summed else 0
        summed[each["reason"]] = {**each, "n_rounds": n_before + each["n_rounds"]}
    return sorted(summed.values(), key=lambda each: -each["n_rounds"])
