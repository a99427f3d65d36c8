"""The options of `specgen serve`: address, keys, limits of requests, and those of each model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from specgen.cli.command import checked
from specgen.cli.flags import setup, text_in
from specgen.cli.flags.typer_groups import Group, group, sign
from specgen.cli.model_loading import Setup
from specgen.errors import UsageError
from specgen.options import ModelChoice
from specgen.sampler_options import option
from specgen.serve.server.options import (
    N_PARALLEL,
    Limits,
    ServedOptions,
    ServerOptions,
    is_loopback,
)

if TYPE_CHECKING:
    from specgen.session.open import WantedSession

_MIB = 1024 * 1024

_server = partial(option, panel="Server")


@group(ServerOptions)
def server(
    *,
    api_key_file: Path | None = _server(
        None,
        "--api-key-file",
        "A file with a key on each line; requests without one of the keys are refused.",
        metavar="FILE",
        show_default="none: anyone who reaches the server may use it",
    ),
    insecure_network: bool = _server(
        False,
        "--insecure-network",
        "Listen on a network address without keys: anyone who reaches it may use the server.",
    ),
    **others: Any,
) -> ServerOptions:
    keys = () if api_key_file is None else _keys(api_key_file)
    options = ServerOptions(api_keys=keys, **others)
    if not keys and not is_loopback(options.host) and not insecure_network:
        raise UsageError(
            f"--host {options.host}: anyone who reaches this address could use the server",
            hint="give --api-key-file, or --insecure-network if that is what you want",
        )
    for origin in options.cors_origins:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and (not separator or not host or "/" in host or scheme != scheme.lower()):
            raise UsageError(
                f"--cors-origin {origin}: not an origin", hint="give one like https://example.org"
            )
    return options


@group(Limits)
def limits(
    *,
    body_mib: int = option(
        Limits().body_bytes // _MIB,
        "--limit-body",
        "Size of a request's body, in MiB; 0 is no limit.",
        min=0,
        metavar="MIB",
        panel="Limits of a request",
    ),
    **others: Any,
) -> Limits:
    return Limits(body_bytes=body_mib * _MIB, **others)


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """The options of one of a server's models."""

    setup: Setup
    parallel: int | None = _server(
        None,
        "--parallel -np",
        "How many answers to generate at once; each has a context of its own.",
        min=1,
        metavar="N",
        show_default=f"{N_PARALLEL}, or fewer if they do not fit into memory",
    )

    def served(self, *, quiet: bool) -> ServedOptions:
        """Return the options in the form that the server takes."""

        def find(models: ModelChoice) -> WantedSession:
            return replace(self.setup, models=models).wanted_session(quiet=quiet)

        return ServedOptions(self.setup.models, find, self.setup.learn, self.parallel)


#: The options that an entry of a file may have, and that the command line sets for all.
model_setup = group(ModelSetup, setup=setup.without("answer_logprobs", "prompt_cache"))(ModelSetup)


def later(options: Group) -> Group:
    """Return a group with a function as its value, which makes that of `options`; keywords replace
    options.
    """
    return replace(options, make=lambda **values: partial(options, **values), parsers={}, groups={})


def options_in(table: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return a model's options in a table of a file as keywords for `model_setup`. Raise
    `UsageError`.
    """
    given: dict[str, Any] = {}

    def take(**values: Any) -> None:
        given.update((name, value) for name, value in values.items() if name in found)

    sign(take, model_setup.parameters)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(take)
    command = typer.main.get_command(app)
    known = {name: each for each in command.params for name in each.opts}
    found: dict[str, Any] = {}
    for key, value in table.items():
        option = known.get(f"--{key}")
        if option is None or key in without:
            raise UsageError(f"{key}: a model has no such option")
        found[option.name or key] = checked(key, value, option, command.context_class(command))
    command.main([], standalone_mode=False, default_map=found)
    return given


def _keys(path: Path) -> tuple[str, ...]:
    """Read the keys in a file. A header can only have printable ASCII."""
    lines = [line.strip() for line in text_in(path, "--api-key-file", "ASCII").splitlines()]
    wrong = [n for n, line in enumerate(lines, 1) if not line.isprintable() or " " in line]
    if wrong or not any(lines):
        what = f"line {wrong[0]} is not a valid key" if wrong else "the file has no key"
        hint = "put one on each line: printable ASCII characters, without spaces"
        raise UsageError(f"--api-key-file {path}: {what}", hint=hint)
    return tuple(filter(None, lines))
