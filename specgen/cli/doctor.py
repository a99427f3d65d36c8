"""``specgen doctor``: shows what this machine and this build can do, and tests decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags import endpoints_of, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

    from specgen.measure.diagnosis import DoctorReport


@flags.takes_options
def doctor(
    *,
    model: str | None = flags.target_option(
        None,
        "Also decode with this model: a GGUF file, or the name of a model on this disk.",
    ),
    rpc: str | None = option(
        None,
        "--rpc",
        "Also check these workers: whether they answer, their memory and round-trip time.",
        metavar="HOST:PORT,...",
    ),
    as_json: bool = flags.JSON_REPORT,
) -> int:
    """Show what this machine and this build of llama.cpp can do, and check that it decodes."""
    from specgen.cli.models import paths_on_disk
    from specgen.cli.output import console_on
    from specgen.measure.diagnosis import diagnose
    from specgen.models.registry import load_registry
    from specgen.session.choose_models import find_model

    path = None
    if model is not None:
        # The name of a model that is not on this disk is an error: nothing is downloaded.
        path = find_model(model, load_registry(), lambda name: paths_on_disk(name)[0])
    endpoints = () if rpc is None else endpoints_of(rpc)
    console = console_on(sys.stderr)
    if console.is_terminal:
        with console.status("checking this machine") as status:
            report = diagnose(path, endpoints, on_check=status.update)
    else:
        report = diagnose(path, endpoints)

    if as_json:
        print(json.dumps(report.to_json_object(), indent=2))
    else:
        _show(report, console_on(sys.stdout))
    report.raise_first_error()
    return 0


def _show(report: DoctorReport, console: Console) -> None:
    """Print a report. Lines are wrapped on a terminal only, so that grep finds whole ones."""
    from rich.text import Text

    sections = _sections(report)
    width = max(len(label) for lines in sections.values() for label in lines)
    for heading, lines in sections.items():
        labelled_lines = [(Text(label.ljust(width)), text) for label, text in lines.items()]
        _show_section(heading, labelled_lines, console)
    passed = Text("ok", "green")
    failed = Text("FAILED", "bold red")
    checks: list[tuple[Text, str]] = []
    for check in report.checks:
        label = passed if check.passed else failed
        checks.append((label, f"{check.name}: {check.message}"))
    _show_section("Checks", checks, console)


def _show_section(
    heading: str,
    lines: Sequence[tuple[Text, str]],
    console: Console,
) -> None:
    """Print a heading, and lines with a label each."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(heading, style="bold"))
    if not console.is_terminal:
        for label, text in lines:
            console.print(Text.assemble("  ", label, f"  {text}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    for label, text in lines:
        table.add_row("", label, Text(text, overflow="fold"))  # paths are shown in full
    console.print(table)


def _sections(report: DoctorReport) -> Mapping[str, Mapping[str, str]]:
    """Return the texts of the report by their headings and labels."""
    from specgen.system.folders import cache_folder, config_folder, data_folder
    from specgen.system.quantities import counted, human_bytes

    machine = report.machine
    cores = f"{machine.n_physical_cores or '?'} cores, {machine.n_logical_cores or '?'} threads"
    total = human_bytes(machine.memory_bytes)
    available = human_bytes(machine.available_bytes)
    about_machine = {
        "system": machine.system,
        "CPU": f"{machine.cpu}, {cores}",
        "memory": f"{total}, {available} available",
        "Python": machine.python,
    }
    if machine.core_limit:
        n_cores = counted(machine.n_usable_cores, "core")
        about_machine["limit on cores"] = f"{n_cores}: {machine.core_limit}"
    if machine.memory_limit:
        about_machine["limit on memory"] = machine.memory_limit
    return {
        "Machine": about_machine,
        "Software": _software(report),
        "Files": {
            "cache": folder_line(cache_folder()),
            "packed weights": _packed_weights_line(),
            "configuration": folder_line(config_folder()),
            "data": folder_line(data_folder()),
        },
    }


def _software(report: DoctorReport) -> dict[str, str]:
    """Return the versions of specgen and llama.cpp, the devices, and the kernels, by label."""
    from specgen.system.quantities import human_bytes

    software = {"specgen": report.version}
    build = report.build
    if build is not None:
        software["llama-cpp-python"] = f"{build.version}, llama.cpp {build.llama_version}"
        software["built in"] = build.system_info
        software["GPU offload"] = "yes" if build.gpu_offload else "no: this build finds no GPU"
        for device in build.devices:
            description = device.description
            if device.memory_bytes:
                description += f", {human_bytes(device.memory_bytes)}"
            software[f"{device.name} ({device.kind})"] = description
    kernels = report.kernels
    line = kernels.label
    if kernels.reason is not None:  # llama.cpp computes instead
        line += f"'s own, not specgen's: {kernels.reason}"
        if kernels.hint:
            line += f"; {kernels.hint}"
    software["kernels on the CPU"] = line
    return software


def _packed_weights_line() -> str:
    """Return the size and the folder of kept packed weights, and how large a model still fits."""
    from specgen.llama.kernels.packed_weights import kept_bytes, room_bytes
    from specgen.system.files import is_writable
    from specgen.system.folders import packed_folder
    from specgen.system.quantities import human_bytes

    folder = packed_folder()
    if not is_writable(folder):
        return folder_line(folder)
    n_room_bytes = room_bytes(folder)
    room = "no room for more"
    if n_room_bytes:
        room = f"room for another model of up to {human_bytes(n_room_bytes)}"
    n_streamed_bytes = room_bytes(folder, is_streamed=True)
    if n_streamed_bytes > n_room_bytes:
        room += f" ({human_bytes(n_streamed_bytes)} if it is larger than memory)"
    return f"{human_bytes(kept_bytes(folder))}, {folder}; {room}"


def folder_line(folder: Path) -> str:
    """Return the path of a folder, with a remark if specgen cannot write to it."""
    from specgen.system.files import NOWHERE, is_writable

    if folder.is_relative_to(NOWHERE):
        return "none: there is no home directory that can be used, so nothing is kept"
    if is_writable(folder):
        return str(folder)
    return f"{folder}: cannot be written, so nothing is kept there"
