"""Races of scripted answers."""

from __future__ import annotations

from specgen.measure.race import Race, RacedAnswer
from tests.helpers.events import Script


def raced(*scripts: Script) -> Race:
    """A race of these answers, the one without drafts first."""
    return Race(tuple(RacedAnswer.of(script.events) for script in scripts))


def short_race(round_s: float = 1.0) -> Race:
    """A race in which both answers are "The cat <sat>": three plain rounds, and two with drafts."""
    plain = Script(draft="none", round_s=round_s).prompt()
    plain.plain("The").plain(" cat").plain(" <sat>").finish()
    drafted = Script(round_s=round_s).prompt()
    drafted.plain("The").round([" cat", " dog"], 1, " <sat>").finish()
    return raced(plain, drafted)
