"""The findings of `specgen tune` as sentences and as JSON, by pure functions."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.events import undrafted_text
from specgen.measure.selection.tuning import DraftFindings, TriedDraft, Tuning
from specgen.session.calibration.gain import Costs, break_even, carried_over, expected_gain
from specgen.session.calibration.threads import BATCH_ROWS, ThreadTimes
from specgen.session.files import name_of
from specgen.system.machine import busy_text, is_busy

if TYPE_CHECKING:
    from specgen.measure.selection.trial import Baseline, DraftFigures

#: A speed-up below this does not count as a gain: it is within the noise of the measurement.
_LEAST_GAIN = 1.03
#: The time of a drafted token with a somewhat smaller draft, as a share of the present draft's time.
_CHEAPER = 0.6
#: Rows of the batch whose cost is reported as an example.
_N_ROWS = 4
#: A batch of `_N_ROWS` that costs no more than this many single tokens is cheap.
_CHEAP_BATCH = 1.3
#: Repeated measurements of a token's time that differ by less than this factor are steady.
_STEADY = 1.4
#: With fewer tokens of answers, the figures depend much on chance.
_N_SURE = 100


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its sentences."""

    heading: str
    sentences: tuple[str, ...]


def advice(tuning: Tuning) -> list[Section]:
    """Return all sections that have sentences, the most important first. An interrupted tuning, or
    that of a busy machine, gets only the results: conclusions would rest on half of the measurements, or on
    times that contradict one another."""
    sections = [
        Section("What drafting is worth here", tuple(_worth(tuning))),
        Section("Expected speed-ups", tuple(_ways(tuning))),
    ]
    if not tuning.is_interrupted and not is_busy(tuning.others_share):
        sections += [
            Section("Why", tuple(_reasons(tuning))),
            Section("What would help", tuple(_wishes(tuning))),
            Section("Settings chosen", tuple(_settings(tuning))),
        ]
    if not tuning.is_interrupted:
        sections.append(Section("How sure this is", tuple(_doubts(tuning))))
    return [section for section in sections if section.sentences]


def name_of_way(way: TriedDraft) -> str:
    """Return the name of a way to draft."""
    if way.draft == "none":
        return "not drafting"
    return f"{name_of(way.draft)} {'and n-grams' if way.ngrams else 'alone'}"


def options_of_way(way: TriedDraft) -> str:
    """Return the options with which `specgen run` drafts in this way."""
    alone = " --no-ngrams" if way.draft not in ("ngram", "none") and not way.ngrams else ""
    return f"--draft {shlex.quote(str(way.draft))}{alone}"


# --- what it is worth ------------------------------------------------------------------------


def _worth(tuning: Tuning) -> Iterator[str]:
    plain = f"{1.0 / tuning.baseline.token_s:.1f}"
    best, own = tuning.best, _own_way(tuning)
    if own is not None:
        yield f"{name_of_way(own)}: {_gain(own.figures, plain)}"
        if (share := own.figures.acceptance_rate) is not None:
            yield (
                f"the target accepts {_percent(share)} of the drafted tokens; a round gives "
                f"{own.figures.mean_accepted_length:.1f} tokens"
            )
    if len(tuning.ways) == 1:
        yield f"plain decoding makes {plain} tokens/s; no draft was tried"
    elif best.figures.speedup < _LEAST_GAIN:
        yield (
            "no draft that was tried is clearly faster than plain decoding (--draft none), which "
            f"makes {plain} tokens/s"
        )
    elif own is None or best.figures.speedup >= _LEAST_GAIN * own.figures.speedup:
        yield f"best: {name_of_way(best)} ({options_of_way(best)}): {_gain(best.figures, plain)}"


def _own_way(tuning: Tuning) -> TriedDraft | None:
    """Return the way of the user's draft model: with n-grams, as `specgen run` uses it, if it was tried."""
    if tuning.draft is None:
        return None
    return tuning.way(tuning.draft.draft, ngrams=True) or tuning.way(tuning.draft.draft)


def _gain(figures: DraftFigures, plain_tokens_per_s: str) -> str:
    return (
        f"x{figures.speedup:.2f} plain decoding, {figures.tokens_per_s:.1f} tokens/s instead "
        f"of {plain_tokens_per_s}; x{figures.worst_speedup:.2f} for the worst prompt"
    )


def _ways(tuning: Tuning) -> Iterator[str]:
    """Yield all ways, the fastest first. Models have no options there: there may be many."""
    if len(tuning.ways) < 2:
        return
    for way in sorted(tuning.ways, key=lambda way: -way.figures.speedup):
        options = "" if isinstance(way.draft, Path) else f" ({options_of_way(way)})"
        yield f"x{way.figures.speedup:.2f}  {name_of_way(way)}{options}"


# --- why -------------------------------------------------------------------------------------


def _reasons(tuning: Tuning) -> Iterator[str]:
    """Yield why drafts pay or do not: by costs and agreement, and by what the policy said of rounds."""
    yield from _costs_and_agreement(tuning)
    for way in tuning.ways:
        figures = way.figures
        if figures.speedup < _LEAST_GAIN and figures.undrafted:
            yield f"{name_of_way(way)}: {undrafted_text(figures.undrafted, figures.n_rounds)}"


def _costs_and_agreement(tuning: Tuning) -> Iterator[str]:
    draft = tuning.draft
    if draft is None:
        yield _batch_text(tuning.baseline.costs)
        yield _bound_text(tuning.baseline.costs, "a draft that takes no time")
        return
    name, rate = draft.draft.name, draft.agreement.rate
    if rate is None:
        yield f"{name} proposes nothing in the target's answers"
        return
    yield (
        f"{name} agrees with the target at {_percent(rate)} of "
        f"{draft.agreement.n_places} places in the target's own answers"
    )
    if draft.costs is None:
        return
    token_s, plain_s = draft.costs.draft_token_s, draft.costs.token_s
    yield f"it drafts a token in {_ms(token_s)}, {token_s / plain_s:.2f} of the target's time"
    yield _batch_text(draft.costs)
    yield f"{_bound_text(draft.costs, 'it')}; it agrees at {_percent(rate)}"
    alone, expected = tuning.way(draft.draft), draft.expected
    if alone is not None and expected is not None:
        measured = alone.figures.speedup
        if expected.is_worth_it and measured < _LEAST_GAIN:
            yield (
                f"so about x{expected.speedup:.2f} was to be expected, but {name} alone gave x{measured:.2f}: "
                "while it drafted, decodes took longer than when they were timed alone"
            )


def _batch_text(costs: Costs) -> str:
    """Return a sentence about the target's time for one token, and for a batch of several rows."""
    n_rows = _n_rows(costs)
    return (
        f"the target takes {_ms(costs.token_s)} for a token, and "
        f"{costs.rows_s(n_rows) / costs.token_s:.2f} times as long for a batch of {n_rows} rows"
    )


def _bound_text(costs: Costs, what: str) -> str:
    """Return a sentence about the least agreement with which a draft pays."""
    least = break_even(costs)
    if least is None:
        return f"at these costs {what} would not save time even if it always agreed"
    return f"at these costs {what} saves time if it agrees at about {_percent(least)} or more"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _n_rows(costs: Costs) -> int:
    return min(_N_ROWS, max(costs.batch_s))


# --- what would help -------------------------------------------------------------------------


def _wishes(tuning: Tuning) -> Iterator[str]:
    """Yield sentences about the expected effect of another draft, or of another kind of target."""
    draft = tuning.draft
    if draft is None:
        if not any(isinstance(way.draft, Path) for way in tuning.ways):
            yield (
                "no draft model was tried: `specgen models list` shows some, and --draft takes "
                "any GGUF file"
            )
        return
    alone = tuning.way(draft.draft)
    if alone is None or draft.costs is None or draft.agreement.rate is None:
        return
    measured, costs, rate = alone.figures.speedup, draft.costs, draft.agreement.rate
    yield from _better_drafts(draft.draft.name, measured, costs, rate)
    yield _better_target(measured, costs, rate)


def _better_drafts(name: str, measured: float, costs: Costs, rate: float) -> Iterator[str]:
    now, cheaper = expected_gain(costs, rate), costs.with_cheaper_draft(_CHEAPER)
    gain = carried_over(measured, now, expected_gain(cheaper, rate))
    yield (
        f"a draft that agrees as often and takes {_ms(cheaper.draft_token_s)} a token "
        f"(perhaps a smaller quantisation of this one): {_about(gain)}; {name} alone "
        f"is at x{measured:.2f} now"
    )
    if rate < 1.0:
        better = (1.0 + rate) / 2.0  # right at half of the places where this one is wrong
        gain = carried_over(measured, now, expected_gain(costs, better))
        yield (
            f"a draft of the same speed that agrees at {_percent(better)} (perhaps one of the target's "
            f"own family): {_about(gain)}"
        )


def _better_target(measured: float, costs: Costs, rate: float) -> str:
    n_rows = _n_rows(costs)
    batch = costs.rows_s(n_rows) / costs.token_s
    if batch <= _CHEAP_BATCH:
        return (
            "the target is well suited to drafts: a batch of "
            f"{n_rows} rows costs {batch:.2f} tokens"
        )
    now, flat = expected_gain(costs, rate), expected_gain(costs.with_flat_batches(), rate)
    return (
        "a target with the same time for a token whose batches cost hardly more than that "
        "(perhaps a larger model, a quantisation with more bits per weight, or a GPU): "
        f"{_about(carried_over(measured, now, flat))}"
    )


def _about(speedup: float) -> str:
    return f"about x{speedup:.2f}" if speedup >= _LEAST_GAIN else f"hardly a gain (x{speedup:.2f})"


# --- settings --------------------------------------------------------------------------------


def _settings(tuning: Tuning) -> Iterator[str]:
    if tuning.threads is not None:
        yield threads_text(tuning.target.name, tuning.threads)
    else:
        yield "threads are as given; without -t and -tb they are chosen by measurement"
    if tuning.draft is not None and tuning.draft.threads is not None:
        yield threads_text(tuning.draft.draft.name, tuning.draft.threads)
    own = _own_way(tuning)
    if own is not None:
        yield _lengths_text(own.figures, max(tuning.baseline.batch_s) - 1)


def _lengths_text(figures: DraftFigures, n_max: int) -> str:
    rule = f"drafts grow while that is expected to save time, to {n_max} tokens at most"
    if figures.draft_length is None:
        return f"{rule}: here nothing was drafted"
    return (
        f"{rule}: here {figures.draft_length:.1f} on average, in {_percent(figures.draft_share)} "
        "of the rounds"
    )


def threads_text(name: str, times: ThreadTimes) -> str:
    """Return a sentence about the numbers of threads that were chosen for a model, and their times."""
    single = _chosen(times.chosen.n_single, times.default, times.single_s)
    batch = _chosen(times.chosen.n_batch, times.default, times.batch_s)
    return f"threads of {name}: {single} for a token, {batch} for a batch of {BATCH_ROWS}"


def _chosen(chosen: int, default: int, seconds: dict[int, float]) -> str:
    if chosen not in seconds or default not in seconds:
        return f"{chosen} (there was nothing to compare)"
    time_s = seconds[chosen]
    if chosen != default:
        return f"{chosen} ({_ms(time_s)}; {_ms(seconds[default])} with the usual {default})"
    others = {count: s for count, s in seconds.items() if count != chosen}
    if not others:
        return f"{chosen} as usual ({_ms(time_s)})"
    count = min(others, key=lambda count: others[count])
    doubt = ", but not surely" if others[count] < time_s else ""
    return f"{chosen} as usual ({_ms(time_s)}; {_ms(others[count])} with {count}{doubt})"


# --- doubts ----------------------------------------------------------------------------------


def _doubts(tuning: Tuning) -> Iterator[str]:
    """Yield reasons to doubt the figures: a busy machine, or too few tokens."""
    busy = []
    if (share := tuning.others_share) is not None and is_busy(share):
        busy.append(busy_text(share))
    times = _token_times(tuning)
    if times and max(times) > _STEADY * min(times):
        busy.append(f"a token took {_ms(min(times))} at one time and {_ms(max(times))} at another")
    if busy:
        yield (
            f"{', and '.join(busy)}: these figures are those of a busy machine; tune again when it "
            "is idle"
        )
    n_tokens = n_answer_tokens(tuning.baseline)
    if n_tokens < _N_SURE:
        yield f"{n_tokens} tokens of answers are few; for more, raise --count or -n"


def _token_times(tuning: Tuning) -> list[float]:
    """Return the target's seconds for a token, measured at different times."""
    threads, times = tuning.threads, list(tuning.baseline.answer_token_s)
    if threads is not None and threads.chosen.n_single in threads.single_s:
        times.append(threads.single_s[threads.chosen.n_single])
    return times


def n_answer_tokens(baseline: Baseline) -> int:
    """Return the number of tokens in all answers of the baseline."""
    return sum(len(answer.tokens) for answer in baseline.answers)


# --- as JSON, and for people -----------------------------------------------------------------


def to_json_object(tuning: Tuning) -> dict[str, Any]:
    """Return all findings as JSON values, with times in seconds."""
    baseline, draft = tuning.baseline, tuning.draft
    return {
        "target": str(tuning.target),
        "plain_tokens_per_s": 1.0 / baseline.token_s,
        "batch_s": {str(size): seconds for size, seconds in sorted(baseline.batch_s.items())},
        "answer_token_s": list(baseline.answer_token_s),
        "n_prompts": len(baseline.answers),
        "n_tokens": n_answer_tokens(baseline),
        "skipped_prompts": list(baseline.skipped),
        "threads": _threads_object(tuning.threads),
        "draft": None if draft is None else _draft_object(draft),
        "ways": [
            {"draft": str(way.draft), "ngrams": way.ngrams, **dataclasses.asdict(way.figures)}
            for way in tuning.ways
        ],
        "best": {"draft": str(tuning.best.draft), "ngrams": tuning.best.ngrams},
        "others_share": tuning.others_share,
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
