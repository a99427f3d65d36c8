"""Which of the drafts that were chosen for a target is taken: the first that works and pays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError

if TYPE_CHECKING:
    from specgen.cli.choosing import DraftChoice
    from specgen.costs import Costs, Key, Outlook
    from specgen.options import ContextOptions, DraftSource
    from specgen.session import Session


@dataclass(frozen=True, slots=True)
class Taken:
    """The draft that was taken, a sentence that says why, and why none of those before it, and
    what was `measured` of each model, for those who want to know."""

    draft: DraftSource
    note: str
    measured: tuple[str, ...]


def take_first(session: Session, choices: Sequence[DraftChoice]) -> Taken:
    """Let a session have the first draft that can draft for its target and, if it is a model
    that nobody measured, can be expected to make it faster."""
    from specgen.costs import kept_costs, outlook
    from specgen.models import costs_file

    said: list[str] = []
    measured: list[str] = []
    target = session.options.target.name
    may_check, may_pay = session.n_rows_max > 1, True
    for choice in choices:
        checks = may_check and isinstance(choice.draft, Path) and not choice.is_measured
        if checks and not may_pay:
            continue
        try:
            key = _key(session, Path(choice.draft)) if checks else None
            costs = kept_costs(costs_file(), key) if key is not None else None
            # What is known not to pay need not be loaded.
            if costs is None or outlook(costs).is_worth_it:
                session.change_draft(choice.draft)
                if checks and costs is None:
                    costs = _measure(session, key)
        except (BackendError, MemoryLimitError, ModelFileError, PairError) as error:
            said.append(error.message)
            continue
        why = choice.why
        if costs is not None:
            draft, expected = Path(choice.draft).name, outlook(costs)
            measured.append(measured_text(target, draft, costs))
            if not expected.is_worth_it:
                said.append(refusal(draft, expected))
                may_pay = not expected.rules_out_all
                continue
            why += f" (about x{expected.speedup:.2f} expected)"
        return Taken(
            choice.draft, "; ".join(filter(None, (*said, why, choice.advice))), tuple(measured)
        )
    session.change_draft("none")
    return Taken("none", "; ".join([*said, "not drafting"]), tuple(measured))


def refusal(draft: str, expected: Outlook) -> str:
    """Why a draft model is not taken, in figures."""
    batch = f"a batch of {expected.n_drafted + 1} costs {expected.batch_tokens:.1f} tokens"
    start = f"not drafting with {draft}: on this machine {batch}"
    figure = f"about x{expected.speedup:.2f}"
    if expected.rules_out_all:
        return f"{start}, too much for a draft model to pay (this one: {figure})"
    doubt = ", too little to count on" if expected.speedup >= 1.0 else ""
    return (
        f"{start} and a drafted token {expected.token_tokens:.2f}, so it would be {figure}{doubt}"
    )


def measured_text(target: str, draft: str, costs: Costs) -> str:
    """What was measured, in milliseconds."""
    from specgen.models import costs_file

    sizes = sorted(costs.batch_s)
    rows = ", ".join(str(size) for size in sizes)
    times = ", ".join(f"{1000 * costs.batch_s[size]:.1f}" for size in sizes)
    where = f"; {costs_file()} keeps it" if costs_file().is_file() else ""
    return (
        f"{target} decodes {rows} rows in {times} ms, "
        f"{draft} a token in {1000 * costs.draft_token_s:.1f} ms{where}"
    )


def _measure(session: Session, key: Key | None) -> Costs:
    """What the session's models cost on this machine, measured now and kept under `key`."""
    from specgen.costs import keep_costs, measure_costs
    from specgen.models import costs_file

    measured = measure_costs(session)
    if key is not None:
        keep_costs(costs_file(), key, measured)
    return measured


def _key(session: Session, draft: Path) -> Key | None:
    """Everything that decides what the session's target and a draft model cost; None if there
    is no such file, which opening it will tell."""
    from specgen.backend.llama import build
    from specgen.doctor import look_at_machine

    if not draft.is_file():
        return None
    options, built, machine = session.options, build(), look_at_machine()
    return {
        "target": _file(options.target),
        "draft": _file(draft),
        "draft_max": options.drafting.max_tokens,
        "target_context": _context(options.target_context),
        "draft_context": _context(options.draft_context),
        "llama_cpp_python": built.version,
        "features": built.system_info,
        "devices": [device.description for device in built.devices],
        "cores": [machine.n_physical_cores, machine.n_logical_cores, _n_usable_cores()],
        "cpu": machine.cpu,
    }


def _file(path: Path) -> dict[str, Any]:
    from specgen.models import identify

    identity = identify(path)
    assert identity is not None, "a model that was opened"
    return {"name": identity.name, "size_bytes": identity.size_bytes}


def _context(options: ContextOptions) -> dict[str, Any]:
    from specgen.backend.llama import default_threads

    n_threads = options.n_threads or default_threads()
    return {
        "n_threads": n_threads,
        "n_threads_batch": options.n_threads_batch or n_threads,
        "n_gpu_layers": options.n_gpu_layers,
        "flash_attention": options.flash_attention,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
    }


def _n_usable_cores() -> int | None:
    """How many of them this process may use, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else None
