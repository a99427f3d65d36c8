"""``specgen batch --on``: servers answer the lines of a batch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specgen.cli.interrupt import Interrupt
from specgen.errors import UsageError
from specgen.json_values import as_json
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
)
from specgen.selection.model_choice import ModelChoice

if TYPE_CHECKING:
    from specgen.batch.lines import Line
    from specgen.batch.on_hosts import Defaults, Host
    from specgen.batch.results import Results

#: The variable with the key that is sent to servers.
KEY_VARIABLE = "SPECGEN_API_KEY"


def check_alone(models: ModelChoice, drafting: DraftOptions, machine: Contexts) -> None:
    """Raise `UsageError` for options that only a server's own command line can set."""
    named = [models.target, models.draft, models.pair, *models.helpers]
    if any(name is not None for name in named):
        raise UsageError("with --on the servers have the models: leave out -m, -md and --pair")
    own = DraftOptions()
    # Settings from environment variables are for other commands.
    if replace(drafting, policy=own.policy, weights=own.weights) != own:
        raise UsageError(
            "with --on the servers decide how to draft: leave out the options of drafting"
        )
    if (machine.target, machine.draft) != (ContextOptions(), ContextOptions()):
        raise UsageError("with --on the servers compute: leave out the options of the machine")


def defaults_of(
    sampling: SamplerOptions, generation: GenerationOptions, chat: bool | None, system: str | None
) -> Defaults:
    """Return the defaults of requests: the options that were given on the command line. The servers decide
    the rest."""
    from specgen.batch.on_hosts import Defaults

    fields: dict[str, Any] = {}
    for given, default in ((sampling, SamplerOptions()), (generation, GenerationOptions())):
        before = as_json(default)
        fields |= {name: value for name, value in as_json(given).items() if value != before[name]}
    fields.pop("grammar", None)
    grammar = generation.grammar
    if grammar is not None:
        is_schema = grammar.form == "json_schema"
        name = "json_schema" if is_schema else "grammar"
        fields[name] = json.loads(grammar.text) if is_schema else grammar.text
    return Defaults(fields, chat, system)


def settings_of(hosts: Sequence[Host], defaults: Defaults) -> Mapping[str, Any]:
    """Return the settings that decide the answers, besides the lines."""
    found: dict[str, Any] = {"target": hosts[0].model, **defaults.fields}
    asked = {"chat": defaults.chat, "system": defaults.system}
    return found | {name: value for name, value in asked.items() if value is not None}


def open_hosts(urls: str, n_slots: int | None) -> list[Host]:
    """Return the servers of a list of URLs. Raises `UsageError`, `BackendError`."""
    from specgen.batch.on_hosts import find_hosts, read_urls

    return find_hosts(read_urls(urls), os.environ.get(KEY_VARIABLE), n_slots)


def answer_on_hosts(
    hosts: Sequence[Host],
    defaults: Defaults,
    lines: Sequence[Line],
    results: Results,
    settings: Mapping[str, Any],
    *,
    patience_s: float,
    quiet: bool,
    note: Callable[[str], None],
) -> tuple[int, int]:
    """Get the lines answered; return the exit code, and the number of errors in results."""
    from specgen.batch.on_hosts import HostsBatch
    from specgen.render.batch_progress import batch_progress, batch_summary
    from specgen.render.text import counted

    job = HostsBatch(
        hosts,
        defaults,
        results,
        settings,
        clock=time.monotonic,
        patience_s=patience_s,
        note=note,
    )
    started = time.perf_counter()
    with Interrupt() as stop, batch_progress(sys.stderr, quiet=quiet) as report:
        try:
            job.run(lines, stop, report)
        finally:
            if job.tally.n_answers:
                with contextlib.suppress(ZeroDivisionError):
                    n_slots = sum(host.n_slots for host in hosts if host.refused is None)
                    where = f"{n_slots} at once on {counted(len(hosts), 'server')}"
                    note(batch_summary(job.tally, time.perf_counter() - started, where))
    return stop.exit_code, job.tally.n_errors
