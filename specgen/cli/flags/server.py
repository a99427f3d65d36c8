"""The options of `specgen serve`: address, keys, limits of requests, and those of each model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from specgen.cli.flags import setup, text_in
from specgen.cli.flags.typer_groups import Group, extends, group, sign
from specgen.cli.model_loading import Setup
from specgen.cli.user_defaults import checked
from specgen.errors import UsageError
from specgen.option_fields import option
from specgen.options import ModelChoice
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


@extends(ServerOptions)
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
    """Return the options of the server itself."""
    keys = () if api_key_file is None else _keys(api_key_file)
    options = ServerOptions(api_keys=keys, **others)
    if not keys and not is_loopback(options.host) and not insecure_network:
        raise UsageError(
            f"--host {options.host}: anyone who reaches this address could use the server",
            hint="give --api-key-file, or --insecure-network if that is what you want",
        )
    for origin in options.cors_origins:
        if origin != "*" and not re.fullmatch(r"[^A-Z/]*://[^/]+", origin):
            raise UsageError(
                f"--cors-origin {origin}: not an origin", hint="give one like https://example.org"
            )
    return options


@extends(Limits)
def limits(
    *,
    body_mib: int = option(
        Limits().body_bytes // _MIB,
        "--limit-body",
        "Maximum size of a request's body, in MiB; 0 is no limit.",
        min=0,
        metavar="MIB",
        panel="Limits of a request",
    ),
    **others: Any,
) -> Limits:
    """Return the limits of a request."""
    return Limits(body_bytes=body_mib * _MIB, **others)


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """The options of one of the server's models."""

    #: The model, and the defaults of its answers.
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
        """Return the options in the form that the server takes.

        The models are found, and downloaded if necessary, only when the server loads them.
        """

        def find(models: ModelChoice) -> WantedSession:
            return replace(self.setup, models=models).wanted_session(quiet=quiet)

        return ServedOptions(self.setup.models, find, self.setup.learn, self.parallel)


#: The options of each model. The command line sets them for all models; a model's table in the
#: file of --models takes precedence.
model_setup = group(
    ModelSetup,
    setup=setup.without("--logprobs", "--prompt-cache").with_default_in_words(
        "--target", "all models on this disk, served by name"
    ),
)


class LaterGroup(Group):
    """A group that a command gets as a function, to make the group's value later, or several times.

    Keywords of the function, from `options_in`, replace options of the command line.
    """

    def __call__(self, **given: Any) -> Callable[..., Any]:
        """Return the function."""
        return partial(super().__call__, **given)


def later(options: Group) -> Any:
    """Return a `LaterGroup` of the options of a group.

    The type is Any since it is the default of a parameter of another type.
    """
    return LaterGroup(options.make, options.members)


def options_in(table: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the options in a model's table as keywords for `model_setup`.

    Args:
        table: The table; its keys are the options' names without dashes.
        without: Keys that the table must not have.

    Raises:
        UsageError: If a key is not allowed, or a value is wrong.
    """
    command = _command_of(model_setup)
    context = command.context_class(command)
    options = {name: option for option in command.params for name in option.opts}
    given = {}
    for key, value in table.items():
        option = options.get(f"--{key}")
        if option is None or key in without:
            raise UsageError(f"{key}: a model has no such option")
        given[option.name] = checked(key, value, option, context)
    return given


def _command_of(options: Group) -> Any:
    """Return the command that Typer builds from the options of a group; it does nothing."""

    def command() -> None: ...

    sign(command, options)
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app)


def _keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file, one on each line that is not empty.

    Raises:
        UsageError: If there is none, or one could not be sent in a header of HTTP.
    """
    keys = []
    hint = "put one on each line: printable ASCII characters, without spaces"
    for number, line in enumerate(text_in(path, "--api-key-file").splitlines(), 1):
        key = line.strip()
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"--api-key-file {path}: line {number} is not a valid key", hint)
        if key:
            keys.append(key)
    if not keys:
        raise UsageError(f"--api-key-file {path}: the file has no key", hint)
    return tuple(keys)
