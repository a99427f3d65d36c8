"""The figures of answers: token usage, timings, and what drafting gained."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specgen.events import FinishedEvent
from specgen.serve.formats.fields import Json


def answer_figures(
    answers: Sequence[FinishedEvent],
    n_reasoning: int = 0,
    n_answers_per_prompt: int = 1,
) -> Json:
    """Return the figures of answers, in the fields that the APIs share.

    Args:
        answers: The last event of each answer: all answers to the first prompt, then the next.
        n_reasoning: The number of tokens in thinking blocks.
        n_answers_per_prompt: The number of answers to each prompt. The tokens of a prompt are
            counted once for all of its answers.

    Returns:
        ``usage`` in OpenAI's form, ``timings`` in llama.cpp's, whose values are all numbers, and
        specgen's own ``speculative``.
    """
    first_answers = answers[::n_answers_per_prompt]
    n_prompt = sum(each.n_prompt_tokens for each in first_answers)
    n_cached = sum(each.n_cached_tokens for each in first_answers)
    n_tokens = sum(each.n_tokens for each in answers)
    return {
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        },
        "speculative": _speculative(answers),
        "timings": _timings(answers, n_prefilled=n_prompt - n_cached, n_cached=n_cached),
    }


def own_figures(figures: Mapping[str, Any]) -> Json:
    """Return the figures without ``usage``, whose form depends on the API."""
    return {name: value for name, value in figures.items() if name != "usage"}


def _speculative(answers: Sequence[FinishedEvent]) -> Json:
    """Return the sums of the answers' drafting figures, and a single answer's speed-up."""
    # The speed-up can only be estimated for a single answer.
    first = answers[0]
    speedup = first.estimated_speedup
    speedup_range = first.estimated_speedup_range
    if len(answers) > 1 or speedup_range is None:
        speedup = None
        speedup_range = None

    n_rounds = sum(each.n_rounds for each in answers)
    n_accepted = sum(each.n_accepted for each in answers)
    # The mean of all answers weights each by its rounds.
    n_committed = sum(each.n_rounds * (each.mean_accepted_length or 0.0) for each in answers)
    drafted_by_position = _sums([each.drafted_by_depth for each in answers])
    #: The number of rounds without a draft, by the reason and its text.
    undrafted: Counter[tuple[str, str]] = Counter()
    for count in itertools.chain.from_iterable(each.undrafted for each in answers):
        undrafted[count.reason, count.text] += count.n_rounds
    return {
        "n_rounds": n_rounds,
        "n_drafted": sum(each.n_drafted for each in answers),
        "n_accepted": n_accepted,
        "acceptance_rate": _ratio(n_accepted, sum(drafted_by_position)),
        "mean_accepted_length": _ratio(n_committed, n_rounds),
        "estimated_speedup": speedup,
        "estimated_speedup_range": speedup_range and list(speedup_range),
        "estimate_is_rough": speedup is not None and first.estimate_is_rough,
        "drafted_by_position": drafted_by_position,
        "accepted_by_position": _sums([each.accepted_by_depth for each in answers]),
        "undrafted": [
            {
                "reason": reason,
                "text": text,
                "n_rounds": n_undrafted,
            }
            for (reason, text), n_undrafted in undrafted.most_common()
        ],
    }


def vllm_metrics(answer: FinishedEvent) -> Json | None:
    """Return an answer's drafting figures in the form of vLLM's ``metrics.speculative_decoding``.

    Returns:
        The figures; None if nothing was drafted.
    """
    # At index n, the number of drafts with at least n accepted tokens.
    n_drafts_by_accepted = [*answer.drafted_by_depth[:1], *answer.accepted_by_depth]
    if not n_drafts_by_accepted:
        return None
    n_drafts = n_drafts_by_accepted[0]
    pairs = itertools.pairwise([*n_drafts_by_accepted, 0])
    return {
        "mean_acceptance_length": 1.0 + answer.n_accepted / n_drafts,
        "draft_acceptance_rate": answer.n_accepted / answer.n_drafted,
        "acceptance_histogram": [at_least - more for at_least, more in pairs],
        "num_accepted_draft_tokens": answer.n_accepted,
        "num_draft_tokens": answer.n_drafted,
        "num_spec_steps": n_drafts,
    }


def _timings(
    answers: Sequence[FinishedEvent],
    *,
    n_prefilled: int,
    n_cached: int,
) -> Json:
    """Return the times of prefill and generation in llama.cpp's fields; 0 if not known."""
    n_tokens = sum(each.n_tokens for each in answers)
    prompt_s = sum(each.prompt_s for each in answers)
    wall_s = sum(each.wall_s for each in answers)
    predicted_s = max(0.0, wall_s - prompt_s)
    tokens_per_s = answers[0].tokens_per_s
    if len(answers) > 1:
        tokens_per_s = _ratio(n_tokens, predicted_s)
    return {
        "cache_n": n_cached,
        "prompt_n": n_prefilled,
        "prompt_ms": 1000.0 * prompt_s,
        "prompt_per_token_ms": _ratio(1000.0 * prompt_s, n_prefilled) or 0.0,
        "prompt_per_second": _ratio(n_prefilled, prompt_s) or 0.0,
        "predicted_n": n_tokens,
        "predicted_ms": 1000.0 * predicted_s,
        "predicted_per_token_ms": _ratio(1000.0 * predicted_s, n_tokens) or 0.0,
        "predicted_per_second": tokens_per_s or 0.0,
        "draft_n": sum(each.n_drafted for each in answers),
        "draft_n_accepted": sum(each.n_accepted for each in answers),
    }


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    """Add up sequences of different lengths, position by position."""
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def _ratio(part: float, total: float) -> float | None:
    """Divide; None if the divisor is not positive."""
    if total <= 0:
        return None
    return part / total
