"""What `specgen tune` found, in words: pure functions from figures to sentences and to JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.choosing import name_of
from specgen.costs import rows_s
from specgen.threads import BATCH_ROWS, ThreadTimes
from specgen.tuning import (
    DraftFindings,
    Tuning,
    Way,
    break_even,
    speedup_with,
    with_cheaper_draft,
    with_flat_batches,
)

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.trial import Figures

#: A gain below this is no gain: another minute measures something else.
_LEAST_GAIN = 1.03
#: The share of a drafted token's time that a draft which is somewhat smaller would still take.
_CHEAPER = 0.6
#: Rows of the batch that stands for what a target's batches cost.
_N_ROWS = 4
#: A batch that costs no more tokens than this is cheap.
_CHEAP_BATCH = 1.3
#: Times of the same thing that differ by less than this factor are much the same.
_STEADY = 1.4
#: With fewer tokens of answers, chance has much to say.
_N_SURE = 100
#: Wide enough to read where output goes to a file.
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and a sentence or two for each thing there is to say."""

    heading: str
    sentences: tuple[str, ...]


def advice(tuning: Tuning) -> list[Section]:
    """Everything there is to say, what matters most first."""
    sections = [
        Section("What drafting is worth here", tuple(_worth(tuning))),
        Section("What would gain how much", tuple(_ways(tuning))),
        Section("Why", tuple(_reasons(tuning))),
        Section("What would help", tuple(_wishes(tuning))),
        Section("Threads", tuple(_all_threads(tuning))),
        Section("How sure this is", tuple(_doubts(tuning))),
    ]
    return [section for section in sections if section.sentences]


def name_of_way(way: Way) -> str:
    """What drafts, in words."""
    if way.draft == "none":
        return "not drafting"
    return f"{name_of(way.draft)} {'and n-grams' if way.ngrams else 'alone'}"


# --- what it is worth ------------------------------------------------------------------------


def _worth(tuning: Tuning) -> Iterator[str]:
    plain = 1.0 / tuning.baseline.token_s
    best, own = tuning.best, _own_way(tuning)
    if own is not None:
        yield f"{name_of_way(own)}: {_gain(own.figures, plain)}"
        if (length := own.figures.draft_length) is not None:
            share = own.figures.acceptance_rate or 0.0
            yield (
                f"its drafts are {length:.1f} tokens long on average, of which the target accepts "
                f"{_percent(share)}; a round makes {own.figures.mean_accepted_length:.1f} tokens"
            )
    if best.figures.speedup < _LEAST_GAIN:
        yield f"nothing that was tried gains anything: plain decoding makes {plain:.1f} tokens/s"
    elif best != own:
        alone = " --no-ngrams" if isinstance(best.draft, Path) and not best.ngrams else ""
        yield (
            f"best is {name_of_way(best)} (--draft {best.draft}{alone}): "
            f"{_gain(best.figures, plain)}"
        )


def _own_way(tuning: Tuning) -> Way | None:
    """The draft that the user has, as `specgen run` takes it."""
    if tuning.draft is None:
        return None
    return tuning.way(tuning.draft.draft, ngrams=True) or tuning.way(tuning.draft.draft)


def _gain(figures: Figures, plain_tokens_per_s: float) -> str:
    return (
        f"x{figures.speedup:.2f} plain decoding, {figures.tokens_per_s:.1f} tokens/s instead "
        f"of {plain_tokens_per_s:.1f}; x{figures.worst_speedup:.2f} for the prompt that it suits "
        "least"
    )


def _ways(tuning: Tuning) -> Iterator[str]:
    """All ways by what they gain."""
    if len(tuning.ways) < 2:
        return
    for way in sorted(tuning.ways, key=lambda way: -way.figures.speedup):
        yield f"x{way.figures.speedup:.2f}  {name_of_way(way)}"


# --- why -------------------------------------------------------------------------------------


def _reasons(tuning: Tuning) -> Iterator[str]:
    draft = tuning.draft
    if draft is None:
        return
    name, rate = draft.draft.name, draft.agreement.rate
    if rate is None:
        yield f"{name} proposes nothing in the target's answers"
        return
    yield (
        f"{name} says what the target says at {_percent(rate)} of "
        f"{draft.agreement.n_places} places in the target's own answers"
    )
    if draft.costs is None or draft.expected is None:
        return
    n_rows, plain_s = _n_rows(draft), draft.costs.batch_s[1]
    yield (
        f"a drafted token costs {draft.costs.draft_token_s / plain_s:.2f} of a plain one "
        f"({1000 * draft.costs.draft_token_s:.1f} of {1000 * plain_s:.1f} ms), a batch of {n_rows} "
        f"{rows_s(draft.costs.batch_s, n_rows) / plain_s:.1f} plain ones"
    )
    least = break_even(draft.costs)
    if least is None:
        yield "at these costs it would not pay even if it were always right"
    else:
        comparison = "above" if rate >= least else "below"
        yield f"at these costs a draft begins to pay at about {_percent(least)}: it is {comparison} that"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _n_rows(draft: DraftFindings) -> int:
    assert draft.costs is not None
    return min(_N_ROWS, max(draft.costs.batch_s))


# --- what would help -------------------------------------------------------------------------


def _wishes(tuning: Tuning) -> Iterator[str]:
    """What a cheaper draft and another kind of target would change."""
    draft = tuning.draft
    if draft is None:
        if not any(way.draft not in ("ngram", "none") for way in tuning.ways):
            yield (
                "no draft model was tried: `specgen models list` names some, and -md takes any "
                "GGUF file"
            )
        return
    alone = tuning.way(draft.draft)
    if alone is None or draft.costs is None:
        return
    measured, name = alone.figures.speedup, draft.draft.name
    now = f"x{measured:.2f} that {name} gains alone"
    cheaper = speedup_with(draft, measured, with_cheaper_draft(draft.costs, _CHEAPER))
    if cheaper is not None:
        token_ms = 1000 * draft.costs.draft_token_s
        yield (
            f"a draft that agrees as often in {_CHEAPER * token_ms:.1f} ms a token instead of "
            f"{token_ms:.1f}, as a smaller quantisation may, would give about x{cheaper:.2f} "
            f"instead of the {now}"
        )
    n_rows, flat = _n_rows(draft), speedup_with(draft, measured, with_flat_batches(draft.costs))
    batch = rows_s(draft.costs.batch_s, n_rows) / draft.costs.batch_s[1]
    if batch <= _CHEAP_BATCH:
        yield f"the target is of the kind that drafts are for: a batch of {n_rows} is cheap"
    elif flat is not None:
        yield (
            f"a batch of {n_rows} costs this target {batch:.1f} tokens; for one whose batches cost "
            "hardly more than a token, since it waits for its weights (a larger model, more "
            f"bits a weight, a GPU), {name} would give about x{flat:.2f}"
        )


# --- threads ---------------------------------------------------------------------------------


def _all_threads(tuning: Tuning) -> Iterator[str]:
    if tuning.threads is not None:
        yield threads_text(tuning.target.name, tuning.threads)
    if tuning.draft is not None and tuning.draft.threads is not None:
        yield threads_text(tuning.draft.draft.name, tuning.draft.threads)


def threads_text(name: str, times: ThreadTimes) -> str:
    """Which numbers of threads were chosen for a model, and what they gain."""
    single = _chosen(times.chosen.n_single, times.default, times.single_s)
    batch = _chosen(times.chosen.n_batch, times.default, times.batch_s)
    return f"{name}: {single} for a token, {batch} for a batch of {BATCH_ROWS}"


def _chosen(chosen: int, default: int, seconds: dict[int, float]) -> str:
    if chosen not in seconds or default not in seconds:
        return f"{chosen} (there was nothing to compare)"
    time = f"{chosen} ({1000 * seconds[chosen]:.1f} ms"
    if chosen != default:
        return f"{time}, with {default} as usual {1000 * seconds[default]:.1f} ms)"
    if others := {count: s for count, s in seconds.items() if count != chosen}:
        count = min(others, key=lambda count: others[count])
        return f"{time} as usual, with {count} {1000 * others[count]:.1f} ms)"
    return f"{time})"


# --- doubts ----------------------------------------------------------------------------------


def _doubts(tuning: Tuning) -> Iterator[str]:
    """What makes the figures less than sure: a machine with other work to do, too few prompts."""
    baseline, threads = tuning.baseline, tuning.threads
    if threads is not None and threads.chosen.n_single in threads.single_s:
        before_s, after_s = threads.single_s[threads.chosen.n_single], baseline.token_s
        if max(before_s, after_s) > _STEADY * min(before_s, after_s):
            yield (
                f"a token took {1000 * before_s:.1f} ms at one time and {1000 * after_s:.1f} ms at "
                "another: the machine has other work to do, tune again when it has not"
            )
    n_tokens = sum(len(answer.tokens) for answer in baseline.answers)
    if n_tokens < _N_SURE:
        yield f"{n_tokens} tokens of answers are few: --count and -n take more"


# --- as JSON, and for people -----------------------------------------------------------------


def to_json_object(tuning: Tuning) -> dict[str, Any]:
    """Everything, with times in seconds."""
    baseline, draft = tuning.baseline, tuning.draft
    return {
        "target": str(tuning.target),
        "plain_tokens_per_s": 1.0 / baseline.token_s,
        "batch_s": {str(size): seconds for size, seconds in sorted(baseline.batch_s.items())},
        "n_prompts": len(baseline.answers),
        "n_tokens": sum(len(answer.tokens) for answer in baseline.answers),
        "skipped_prompts": list(baseline.skipped),
        "threads": _threads_object(tuning.threads),
        "draft": None if draft is None else _draft_object(draft),
        "ways": [
            {"draft": str(way.draft), "ngrams": way.ngrams, **dataclasses.asdict(way.figures)}
            for way in tuning.ways
        ],
        "best": {"draft": str(tuning.best.draft), "ngrams": tuning.best.ngrams},
        "refused": [{"file": str(file), "reason": reason} for file, reason in tuning.refused],
        "advice": [sentence for section in advice(tuning) for sentence in section.sentences],
        "is_interrupted": tuning.is_interrupted,
    }


def _draft_object(draft: DraftFindings) -> dict[str, Any]:
    costs, expected = draft.costs, draft.expected
    return {
        "file": str(draft.draft),
        "token_s": None if costs is None else costs.draft_token_s,
        "n_places": draft.agreement.n_places,
        "agreement_rate": draft.agreement.rate,
        "break_even_rate": None if costs is None else break_even(costs),
        "expected": None if expected is None else dataclasses.asdict(expected),
        "threads": _threads_object(draft.threads),
    }


def _threads_object(times: ThreadTimes | None) -> dict[str, Any] | None:
    return None if times is None else dataclasses.asdict(times)


def print_advice(tuning: Tuning, console: Console) -> None:
    """Print the sections, for people."""
    from rich.padding import Padding
    from rich.text import Text

    from specgen.render.text import counted

    if not console.is_terminal:
        console.width = _WIDTH
    n_prompts = counted(len(tuning.baseline.answers), "prompt")
    console.print(Text(f"{tuning.target.name}, {n_prompts}, temperature 0"))
    for section in advice(tuning):
        console.print()
        console.print(Text(section.heading, "bold"))
        for sentence in section.sentences:
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
