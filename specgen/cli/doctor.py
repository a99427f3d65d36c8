"""``specgen doctor``: what this machine and this build can do, and whether it decodes."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags import endpoints_of, option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from specgen.measure.diagnosis import DoctorReport


@flags.takes_options
def doctor(
    *,
    model: str | None = option(
        None,
        "--model -m",
        "Also decode with this model: a GGUF file, or the name of a model on this disk.",
        metavar="FILE|NAME",
    ),
    rpc: str | None = option(
        None,
        "--rpc",
        "Also check these workers: whether they answer, their memory and round trip.",
        metavar="HOST:PORT,...",
    ),
    as_json: bool = flags.JSON_REPORT,
) -> int:
    """Show what this machine and this build of llama.cpp can do, and check that it decodes."""
    from rich.console import Console

    from specgen.cli.models import on_disk
    from specgen.measure.diagnosis import diagnose
    from specgen.models.registry import load_registry
    from specgen.session.choose_models import find_model

    path = None
    if model is not None:  # it is not fetched
        path = find_model(model, load_registry(), lambda name: on_disk(name)[0])
    endpoints = () if rpc is None else endpoints_of(rpc)
    console = Console(stderr=True)
    with console.status("checking this machine") if console.is_terminal else nullcontext() as line:
        show = line.update if line is not None else lambda _name: None
        report = diagnose(path, endpoints, on_check=show)

    if as_json:
        print(json.dumps(report.to_json_object(), indent=2))
    else:
        _show(report, Console(highlight=False))
    report.raise_first_error()
    return 0


def _show(report: DoctorReport, console: Console) -> None:
    """Print a report. Lines are broken on a terminal only, so that the output of a pipe can be
    searched.
    """
    from rich.table import Table
    from rich.text import Text

    marks = {True: Text("ok", "green"), False: Text("FAILED", "bold red")}
    parts = {
        name: [(Text(k), v) for k, v in each.items()] for name, each in _sections(report).items()
    }
    width = max(len(label) for entries in parts.values() for label, _ in entries)
    checks = [(marks[each.passed], f"{each.name}: {each.message}") for each in report.checks]
    for heading, entries in (parts | {"Checks": checks}).items():
        console.print(Text(heading, style="bold"))
        table = Table.grid(padding=(0, 2))
        for label, text in entries:
            label.pad_right(width - len(label) if heading in parts else 0)
            table.add_row("", label, Text(text))
            if not console.is_terminal:
                console.print(Text.assemble("  ", label, f"  {text}"), soft_wrap=True)
        if console.is_terminal:
            console.print(table)


def _sections(report: DoctorReport) -> Mapping[str, Mapping[str, str]]:
    from specgen.llama.kernels.packed_weights import kept_bytes, room_bytes
    from specgen.system.folders import cache_folder, config_folder, data_folder, packed_folder
    from specgen.system.quantities import human_bytes

    machine, build, packed = report.machine, report.build, packed_folder()
    cores = f"{machine.n_physical_cores or '?'} cores, {machine.n_logical_cores or '?'} threads"
    available, total = human_bytes(machine.available_bytes), human_bytes(machine.memory_bytes)
    kept, n_room = human_bytes(kept_bytes(packed)), room_bytes(packed)
    room = f"room for those of a model of {human_bytes(n_room)}" if n_room else "no room for more"
    status, software = report.kernels, {"specgen": report.version}
    advice = f"; {status.hint}" if status.hint else ""
    why = f"'s own, not specgen's: {status.reason}{advice}" if status.reason is not None else ""
    kernels = f"{status.label}{why}"
    if build is not None:
        software["llama-cpp-python"] = f"{build.version}, llama.cpp {build.llama_version}"
        software["built in"] = build.system_info
        software["GPU offload"] = "yes" if build.gpu_offload else "no: this build finds no GPU"
        for device in build.devices:
            memory = f", {human_bytes(device.memory_bytes)}" if device.memory_bytes else ""
            software[f"{device.name} ({device.kind})"] = f"{device.description}{memory}"
    return {
        "Machine": {
            "system": machine.system,
            "CPU": f"{machine.cpu}, {cores}",
            "memory": f"{total}, {available} available",
            "Python": machine.python,
        },
        "Software": software | {"kernels on the CPU": kernels},
        "Files": {
            "cache": folder_line(cache_folder()),
            "packed weights": f"{kept}, {packed}; {room}",
            "configuration": str(config_folder()),
            "data": folder_line(data_folder()),
        },
    }


def folder_line(folder: Path) -> str:
    """Return the name of a folder that specgen makes and writes to; with a remark if it cannot."""
    from specgen.system.files import existing_parent

    there = existing_parent(folder)
    is_usable = there.is_dir() and os.access(there, os.W_OK)
    return str(folder) if is_usable else f"{folder}: cannot be written, so nothing is kept there"
