"""``specgen doctor``: what this machine and this build can do, and whether it decodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.flags import endpoints_of
from specgen.errors import ModelFileError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.llama.kernels.admission import KernelStatus
    from specgen.measure.doctor import DoctorReport
    from specgen.system.llama_build import Build


class DoctorCommand(Command):
    """A command that reports a mistake in the file of the user's defaults, and goes on without them."""

    #: The mistake, until the report has it.
    mistake: UsageError | None = None

    def _defaults(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        DoctorCommand.mistake = None
        try:
            return super()._defaults(ctx, given)
        except UsageError as error:
            DoctorCommand.mistake = error
            return {}

    @staticmethod
    def say_mistake() -> str:
        """Raise the mistake."""
        if DoctorCommand.mistake is not None:
            raise DoctorCommand.mistake
        return "can be read"


COMMAND_CLASS = DoctorCommand


@flags.takes_options(
    model=Option(
        "--model",
        "-m",
        metavar="FILE|NAME",
        help="Also decode with this model: a GGUF file, or the name of a model on this disk.",
    ),
    rpc=Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Also check these workers: whether they answer, their memory and round trip.",
    ),
    as_json=flags.JSON_REPORT,
)
def doctor(*, model: str | None = None, rpc: str | None = None, as_json: bool = False) -> int:
    """Show what this machine and this build of llama.cpp can do, and check that it decodes."""
    from rich.console import Console

    from specgen.measure.doctor import checked, diagnose

    path = None if model is None else _model_file(model)
    endpoints = () if rpc is None else endpoints_of(rpc)
    console = Console(stderr=True)
    with console.status("checking this machine") if console.is_terminal else nullcontext() as line:
        show = line.update if line is not None else lambda _name: None
        report = diagnose(path, endpoints, on_check=show)
    if DoctorCommand.mistake is not None:
        wrong = checked("defaults", DoctorCommand.say_mistake)
        report = replace(report, checks=(*report.checks, wrong))
    if as_json:
        print(json.dumps(report.to_json_object(), indent=2))
    else:
        _show(report, Console(highlight=False))
    report.raise_first_error()
    return 0


def _model_file(name: str) -> Path:
    """Return a model's file; raise `SpecgenError` for names that are unknown or whose file is not here."""
    from specgen.models.hub import find_in_cache, is_reference, locate, parse_reference
    from specgen.models.registry import load_registry
    from specgen.session.files import find_model

    registry = load_registry()

    def find(name: str) -> Path:
        is_on_hub = is_reference(name)
        path = find_in_cache(parse_reference(name)) if is_on_hub else locate(registry.model(name))
        if path is None:
            hint = f"fetch it: specgen models pull {name}"
            raise ModelFileError(f"{name} is not on this disk", hint=hint)
        return path

    return find_model(name, registry, find)


def _show(report: DoctorReport, console: Console) -> None:
    """Print a report. No line is broken, so that the output of a pipe can be searched."""
    from rich.text import Text

    sections = list(_sections(report))
    width = max(len(label) for _, entries in sections for label, _ in entries)
    for heading, entries in sections:
        console.print(Text(heading, style="bold"))
        for label, text in entries:
            console.print(Text(f"  {label:<{width}}  {text}"), soft_wrap=True)
    console.print(Text("Checks", style="bold"))
    for check in report.checks:
        mark = ("ok", "green") if check.passed else ("FAILED", "bold red")
        entry = Text.assemble("  ", mark, f"  {check.name}: {check.message}")
        console.print(entry, soft_wrap=True)


def llama_version_line(build: Build) -> str:
    """Return the versions of llama-cpp-python and llama.cpp; if others are needed, which and how."""
    from specgen.system.llama_build import REBUILD, REQUIRED_VERSION

    versions = f"{build.version}, llama.cpp {build.llama_version}"
    if build.has_required_version:
        return versions
    return f"{versions}: specgen is made for {REQUIRED_VERSION}; {REBUILD}"


def kernels_line(status: KernelStatus, *, has_gpu: bool = False) -> str:
    """Return what computes, as events name it; if that is llama.cpp on the CPU, with the reason and what to do."""
    on_gpu, on_cpu = ("llama.cpp on the GPU, ", " on the CPU") if has_gpu else ("", "")
    if status.reason is None:
        return f"{on_gpu}{status.label}{on_cpu}"
    advice = f"; {status.hint}" if status.hint else ""
    return f"{on_gpu}{status.label}'s own{on_cpu}, not specgen's: {status.reason}{advice}"


def folder_line(folder: Path) -> str:
    """Return the name of a folder that specgen makes and writes to; with a remark if it cannot."""
    from specgen.system.files import existing_parent

    there = existing_parent(folder)
    is_usable = there.is_dir() and os.access(there, os.W_OK)
    return str(folder) if is_usable else f"{folder}: cannot be written, so nothing is kept there"


def _sections(report: DoctorReport) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield headings and their items: a label and a text each."""
    from specgen.llama.kernels.packed_weights import kept_bytes, room_bytes
    from specgen.models.files import packed_folder
    from specgen.system.units import human_bytes

    machine, build, folder = report.machine, report.build, packed_folder()
    cores = f"{machine.n_physical_cores or '?'} cores, {machine.n_logical_cores or '?'} threads"
    available, total = human_bytes(machine.available_bytes), human_bytes(machine.memory_bytes)
    yield (
        "Machine",
        [
            ("system", machine.system),
            ("CPU", f"{machine.cpu}, {cores}"),
            ("memory", f"{total}, {available} available"),
            ("Python", machine.python),
        ],
    )
    software = [("specgen", report.version)]
    if build is not None:
        software += [
            ("llama-cpp-python", llama_version_line(build)),
            *((f"built in, {part}", " ".join(names)) for part, names in build.features.items()),
            ("GPU offload", "yes" if build.gpu_offload else "no: this build finds no GPU"),
        ]
        for device in build.devices:
            memory = f", {human_bytes(device.memory_bytes)}" if device.memory_bytes else ""
            software.append((f"{device.name} ({device.kind})", f"{device.description}{memory}"))
    has_gpu = build is not None and build.gpu_offload
    software.append(("kernels", kernels_line(report.kernels, has_gpu=has_gpu)))
    yield ("Software", software)
    n_room = room_bytes(folder)
    room = f"those of a model of up to {human_bytes(n_room)} are kept"
    if not n_room:
        room = "no others are kept: the disk has too little room (a tenth of it stays free)"
    yield (
        "Files",
        [
            ("cache", folder_line(report.cache_folder)),
            ("packed weights", f"{human_bytes(kept_bytes(folder))}, {folder}; {room}"),
            ("configuration", str(report.config_folder)),
            ("data", folder_line(report.data_folder)),
            *((name, str(path)) for name, path in report.models.items()),
        ],
    )
