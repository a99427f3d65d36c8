"""The summary of a run."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from rich.console import Console

from specgen.events import FinishedEvent, ReasonCount
from specgen.render.summary import print_summary, summary_items, summary_line
from tests.helpers.events import Script

#: How the line about the answer of `finished` begins.
FIRST_LINE = "8 tokens in 800 ms: 500 ms to the first token, then 26.7 tokens/s"


def finished(**changes: Any) -> FinishedEvent:
    script = Script().prompt().round(["a", "b", "c"], 2, "d").round(["e", "f", "g"], 3, "h")
    return dataclasses.replace(script.plain("i").finished(), **changes)


def items(event: FinishedEvent, draft: str | None = "draft.gguf") -> dict[str, str]:
    return dict(summary_items(event, draft))


def printed(event: FinishedEvent, **options: Any) -> str:
    stream = io.StringIO()
    print_summary(Console(file=stream, width=80), event, **options)
    return stream.getvalue()


def test_the_lines_of_a_summary() -> None:
    event = finished(wall_s=8.0, draft_s=2.0, target_s=5.96, loop_s=0.04, tokens_per_s=12.345)
    assert items(event) == {
        "answer": "3 rounds, 2.67 tokens per pass of the target",
        "prompt": "12 tokens, first token after 500 ms",
        "drafts": "acceptance rate 83%, 5 of 6 tokens accepted",
        "a round": "tokens added: 1 ▃ 33%  3 ▃ 33%  4 ▃ 33%",
        "time": "prompt 5%, draft 25%, target 70%, specgen <1%",
        "end": "the model ended the text",
    }


def test_what_was_not_read_again_and_why_little_was_drafted() -> None:
    event = finished(n_prompt_tokens=4056, n_cached_tokens=4000)
    said = "4056 tokens, 4000 of them cached, first token after 500 ms"
    assert items(event)["prompt"] == said
    found = ReasonCount("nothing_found", "nothing found", 20)
    cost = ReasonCount("cost", "a row costs 0.7 of a token", 14)
    event = finished(n_rounds=52, undrafted=(found, cost))
    assert items(event)["reasons"] == (
        "34 of 52 rounds drafted nothing: nothing found (20); a row costs 0.7 of a token (14)"
    )
    assert "reasons" not in items(dataclasses.replace(event, n_rounds=136))


@pytest.mark.parametrize(
    ("stopped_by", "words"),
    [
        (None, "the model ended the text"),
        ("</s>", "stopped at '</s>'"),
        ("\n\x1b", "stopped at '↵␛'"),
    ],
)
def test_why_it_ended(stopped_by: str | None, words: str) -> None:
    assert items(finished(stopped_by=stopped_by))["end"] == words


def test_how_the_gain_is_known() -> None:
    event = finished(
        wall_s=10.0,
        prompt_s=5.0,
        estimated_speedup=1.519,
        estimated_speedup_range=(1.42, 1.63),
        plain_tokens_per_s=8.1,
        estimate="from 3 decodes at the end",
    )
    known = "8.10 tokens/s without drafts, estimated from 3 decodes at the end"
    assert items(event)["gain"] == known
    # Where reading the prompt takes a part of the time, the gain is that of the whole answer.
    event = dataclasses.replace(event, estimated_whole_speedup=1.2595)
    assert items(event)["gain"] == f"after the first token 1.4 to 1.6 times, {known}"
    assert "; 1.2 to 1.3 times as fast as without drafts" in summary_line(event)
    event = dataclasses.replace(event, estimated_whole_speedup=1.51)
    assert items(event)["gain"] == known
    busy = "other programs were using 40% of the machine's cores"
    rough = dataclasses.replace(event, others_share=0.4, estimate_is_rough=True)
    assert items(rough)["gain"] == f"{busy}, {known}"
    assert items(finished(estimate="not known: why"))["gain"] == "not known: why"
    event = finished(estimated_speedup=0.8)
    advice = "try `--draft none`, `--draft ngram` or a smaller `--draft-max`"
    assert items(event)["gain"] == advice
    assert "`--draft ngram`" not in items(event, draft="ngram")["gain"]
    assert "gain" not in items(dataclasses.replace(event, estimate_is_rough=True))


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ((1.06, 1.9), "1.1 to 1.9 times as fast as without drafts"),
        ((1.51, 1.54), "1.5 times as fast as without drafts"),
        ((0.9, 1.9), "about as fast as without drafts (0.9 to 1.9 times)"),
        ((1.03, 1.2), "about as fast as without drafts (1.0 to 1.2 times)"),
        ((0.96, 0.97), "about as fast as without drafts"),
        ((0.7, 0.9), "slower than without drafts (0.7 to 0.9 times)"),
    ],
)
def test_a_speed_up_is_shown_with_its_uncertainty_and_not_if_there_may_be_none(
    between: tuple[float, float], said: str
) -> None:
    event = finished(estimated_speedup=sum(between) / 2, estimated_speedup_range=between)
    assert summary_line(event).endswith(f"; {said}")


def test_a_file_gets_a_line_for_each_item_and_who_saw_colours_the_legend() -> None:
    event = finished(estimated_speedup=0.8, estimate="in a long sentence, " * 9)
    lines = printed(event).splitlines()
    assert lines[0] == f"{FIRST_LINE}; slower than without drafts (0.8 times)"
    assert [line.partition(":")[0] for line in lines[1:]] == list(items(event))
    assert printed(event, whole=False).splitlines() == lines[:1]
    assert "\x1b" not in printed(event)
    legend = "accepted  corrected  bonus  plain  rejected"
    assert printed(finished(), whole=False, show_legend=True).splitlines()[1:] == [legend]
    plain = Script().plain("a").finished()
    assert legend not in printed(plain, show_legend=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, FIRST_LINE),
        ({"n_tokens": 1}, "1 token in 800 ms"),
        (
            {"finish_reason": "length"},
            FIRST_LINE.replace("tokens in", "tokens (cut off: raise -n for more) in"),
        ),
        ({"n_drafted": 0}, f"{FIRST_LINE}; nothing was drafted"),
        # Both times are in the same unit, unless the first would be nothing then.
        ({"wall_s": 1.3}, "in 1.30 s: 0.50 s to the first token, then 26.7 tokens/s"),
        (
            {"wall_s": 1.3, "time_to_first_token_s": 0.004, "prompt_s": 0.004},
            "in 1.30 s: 4 ms to the first token, then 26.7 tokens/s",
        ),
        (
            {"wall_s": 3.5, "prompt_s": 3.25},
            "in 3.50 s: 3.25 s to the first token, then 26.7 tokens/s",
        ),
        (
            {"n_tokens": 3, "wall_s": 3.5, "prompt_s": 3.25},
            "3 tokens in 3.50 s: 3.25 s of it for prefill",
        ),
        (
            {"finish_reason": "context"},
            FIRST_LINE.replace("tokens in", "tokens (the context is full: raise -c for more) in"),
        ),
        (
            {"finish_reason": "interrupted"},
            FIRST_LINE.replace("tokens in", "tokens (interrupted) in"),
        ),
        ({"loading_s": 0.9}, "26.7 tokens/s"),
        (
            # Of two models, one was packed.
            {"loading_s": 1.0, "packing_s": 7.0, "measuring_s": 0.5, "starting_s": 2.1},
            (
                "; before that: starting 2.10 s, loading and packing 8.00 s, "
                "measuring what drafting costs 0.50 s"
            ),
        ),
        (
            {"between": (1.2, 2.0), "estimate_is_rough": True},
            (
                f"{FIRST_LINE}; about 1.5 times as fast as without drafts "
                "(rough: the machine was busy)"
            ),
        ),
        (
            {"between": (0.8, 1.0), "estimate_is_rough": True},
            "slower than without drafts (0.9 times; rough: the machine was busy)",
        ),
        (
            # The middle of this range is 1.2, but nothing was gained.
            {"between": (0.5, 1.9), "estimate_is_rough": True},
            f"{FIRST_LINE}; about as fast as without drafts (rough: the machine was busy)",
        ),
        ({"others_share": 0.4}, FIRST_LINE),
    ],
)
def test_the_first_line_is_plain_words(changes: dict[str, Any], said: str) -> None:
    if between := changes.pop("between", None):
        speedup = math.sqrt(between[0] * between[1])  # as in real events
        changes |= {"estimated_speedup": speedup, "estimated_speedup_range": between}
    assert summary_line(finished(**changes)).endswith(said)
