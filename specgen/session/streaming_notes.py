"""What users are told about a target that is larger than memory, before its first answer."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from specgen.llama.kernels.packed_weights import Streaming, streaming_of, weight_sizes
from specgen.method.acceptance import AcceptanceRates
from specgen.session.calibration import (
    ASSUMED_ACCEPTANCE,
    expected_speedup,
    is_pair_measured,
    known_costs,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.session import Session
from specgen.system.disk import read_speed
from specgen.system.folders import packed_folder
from specgen.system.quantities import human_bytes, rough_seconds


def streaming_notes(session: Session) -> Iterator[str]:
    """Yield notes about a target whose weights do not fit into memory; none if they fit."""
    if not session.target.is_streamed:
        return
    yield _summary(session)
    yield from _unpacked_notes(session)
    if platform.system() != "Linux":
        yield (
            "this system decides by itself which weights stay in memory and what is read ahead; "
            "on Linux, specgen does, which is faster"
        )


def _summary(session: Session) -> str:
    """Return what each pass reads, and how long that takes, as far as it is known."""
    target = session.target
    read = f"{human_bytes(target.streamed_bytes)} are read from disk per pass"
    if target.loaded.is_unpacked:
        read = "what does not fit is read from disk in each pass"
    text = f"{human_bytes(target.size_bytes)} of weights"
    if session.budget.max_bytes is not None:
        text += f", {human_bytes(session.budget.max_bytes)} of memory"
    text += f": {read}"
    pass_s = pass_seconds(session)
    if pass_s is not None:
        text += f", about {rough_seconds(pass_s)}"
    token_s = _drafted_token_s(session)
    if token_s is not None:
        text += f"; with drafts about {rough_seconds(token_s)} a token"
    return text


def pass_seconds(session: Session) -> float | None:
    """Return the seconds of a streamed target's pass: as measured before, or by the disk's speed.

    It is None if neither is known.
    """
    if is_pair_measured(session, None):
        return session.costs.table().seconds(1)
    target = session.target
    packed = target.loaded.packed
    if packed is None:  # unknown: the system decides what it reads of the model's own file
        return None
    speed = read_speed(packed.path, session.clock)
    return None if speed is None else target.streamed_bytes / speed


def _drafted_token_s(session: Session) -> float | None:
    """Return the expected seconds per token with drafts; None if that is not known.

    It follows from the measured costs of the pair, and from how often tokens were accepted before.
    """
    draft = session.draft
    costs = None
    if draft is not None and draft.cost_key is not None:
        costs = known_costs(session, draft.cost_key)
    if draft is None or costs is None:
        return None
    acceptance = ASSUMED_ACCEPTANCE
    counts = DrafterFactory(session).acceptance_counts().get(draft.origin)
    if counts is not None and counts.n_judged.any():
        acceptance = AcceptanceRates(draft.origin, counts).mean()
    return costs.batch_s[1] / expected_speedup(costs, acceptance)


def _unpacked_notes(session: Session) -> Iterator[str]:
    """Yield a note if the weights are not packed: why, and what would help."""
    target = session.target
    if not target.loaded.is_unpacked:
        return
    slower = "so the system reads the model's own file as it is needed, which is slower"
    match streaming_of(target.file):
        case Streaming.NO_ROOM:
            packed_bytes = weight_sizes(target.file).packed_bytes
            yield (
                f"there is no room for {human_bytes(packed_bytes)} of packed weights in "
                f"{packed_folder()}, {slower}: free {human_bytes(2 * packed_bytes)} on that disk, "
                "or set SPECGEN_CACHE to a folder on another one"
            )
        case Streaming.NOT_KEPT:
            yield f"--packed-cache off keeps no packed weights, {slower}: leave it out"
        case Streaming.EXPERTS:
            yield (
                f"{target.name} is a mixture of experts, which is not packed if it is larger than "
                f"memory, {slower}"
            )
        case Streaming.OTHER_KERNELS:
            yield f"specgen's kernels do not compute {target.name}, {slower} (`specgen doctor`)"
        case _:
            yield f"the weights could not be packed into {packed_folder()}, {slower}"
