"""Load the models of a benchmark: the lineups of a plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.engine.loaded_models import Models
from specgen.measure.bench.contenders import SessionContender
from specgen.measure.bench.peer_contenders import peers_of
from specgen.measure.bench.plan import PLAIN, Field, Plan, Stages
from specgen.measure.bench.runs import Lineup

if TYPE_CHECKING:
    from specgen.measure.bench.contenders import Contender
    from specgen.options import DraftOptions
    from specgen.system.progress import Progress


@contextlib.contextmanager
def lineups(
    field: Field, plan: Plan, interrupted: Callable[[], bool], progress: Progress
) -> Iterator[list[Lineup]]:
    """Yield a lineup for each temperature, with its models loaded until the end.

    Each contender has models with weights of its own: if llama.cpp repacks weights for the CPU, or keeps
    them on a GPU, each takes memory. Raise `ModelFileError`, `PairError`.
    """
    n_contenders = len(plan.temperatures) * (1 + len(field.drafts) * len(plan.ways))
    opened: list[Models] = []
    with contextlib.ExitStack() as stack:

        def contender(
            name: str, draft: Stages, drafting: DraftOptions, temperature: float
        ) -> SessionContender:
            progress(f"loading {field.name}", len(opened), n_contenders)
            options = plan.options(field, draft)
            options = replace(
                options,
                drafting=drafting,
                sampler=replace(options.sampler, temperature=temperature),
            )
            # Each contender learns its own costs and acceptance rates and keeps them for all prompts: no
            # contender gains or loses by the others.
            loaded = stack.enter_context(Models(options, time.perf_counter))
            opened.append(loaded)
            return SessionContender(name, loaded, chat=plan.chat, interrupted=interrupted)

        found: list[Lineup] = []
        for temperature in plan.temperatures:
            plain = contender(PLAIN, ("none",), replace(plan.drafting, policy="fixed"), temperature)
            others: list[Contender] = [
                contender(plan.name(name, way), draft, plan.drafting_of(way), temperature)
                for name, draft in field.drafts.items()
                for way in plan.ways
            ]
            loaded = opened[-1 - len(others)]
            drafts = _same_vocabulary(field, opened)
            for against in plan.against:
                others += peers_of(
                    against,
                    loaded,
                    drafts,
                    folder=plan.peers,
                    chat=plan.chat,
                    interrupted=interrupted,
                )
            found.append(Lineup(field.name, temperature, plain, tuple(others)))
        yield found


def _same_vocabulary(field: Field, sessions: Sequence[Models]) -> dict[str, Path]:
    """Return the draft models with the target's vocabulary, by name: llama.cpp refuses others."""
    own = {
        loaded.options.draft
        for loaded in sessions
        if not (loaded.drafts.own_vocabulary is not None)
    }
    firsts = {stages[0]: name for name, stages in field.drafts.items() if len(stages) == 1}
    return {
        firsts.get(draft, draft.name): draft
        for draft, *_ in field.drafts.values()
        if isinstance(draft, Path) and draft in own
    }
