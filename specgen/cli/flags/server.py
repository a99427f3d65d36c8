"""The options of `specgen serve`: address, keys, and limits of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.flags.text import utf8
from specgen.errors import UsageError
from specgen.server.options import Limits, ServerOptions

_DEFAULT = ServerOptions()
_LIMITS = Limits()
_SERVER = "Server"
_REQUESTS = "Limits of a request"
_MIB = 1024 * 1024


def server(
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="The address to listen on. An address that other machines can reach needs "
            "--api-key-file.",
            rich_help_panel=_SERVER,
        ),
    ] = _DEFAULT.host,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="The port to listen on; 0 picks a free one.",
            rich_help_panel=_SERVER,
        ),
    ] = _DEFAULT.port,
    alias: Annotated[
        str | None,
        typer.Option(
            "--alias",
            "-a",
            metavar="NAME",
            parser=utf8,
            help="The model's name in responses.",
            show_default="its file's",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="A file with a key on each line; requests without one of the keys are refused.",
            show_default="none: anyone who reaches the server may use it",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Let web pages of this origin (for example https://example.org; * is any) use the "
            "server; may be given several times.",
            show_default="none",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            help="Listen on a network address without keys: anyone who reaches it may use the server.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s",
            min=0.0,
            metavar="SECONDS",
            help="How long unfinished answers may go on after SIGTERM.",
            rich_help_panel=_SERVER,
        ),
    ] = _DEFAULT.drain_s,
    limit_body: Annotated[
        int,
        typer.Option(
            "--limit-body",
            min=0,
            metavar="MIB",
            help="Size of a request's body, in MiB; 0 is no limit.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.body_bytes // _MIB,
    limit_prompt: Annotated[
        int,
        typer.Option(
            "--limit-prompt",
            min=0,
            metavar="TOKENS",
            help="Length of a prompt; 0 is as long as fits into the context.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.prompt_tokens,
    limit_tokens: Annotated[
        int,
        typer.Option(
            "--limit-tokens",
            min=0,
            metavar="TOKENS",
            help="Length of an answer; 0 is as long as fits into the context.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.answer_tokens,
    limit_answers: Annotated[
        int,
        typer.Option(
            "--limit-answers",
            min=0,
            metavar="N",
            help="Answers to one request (its prompts times its n); 0 is no limit.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.n_answers,
    limit_queue: Annotated[
        int,
        typer.Option(
            "--limit-queue",
            min=0,
            metavar="N",
            help="Answers that may wait; further requests get status 429.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.n_waiting,
    limit_time: Annotated[
        float,
        typer.Option(
            "--limit-time",
            min=0.0,
            metavar="SECONDS",
            help="Time from a request to the end of its answers; they are cut off then. 0 is no limit.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.request_s,
    limit_client: Annotated[
        float,
        typer.Option(
            "--limit-client",
            min=0.0,
            metavar="SECONDS",
            help="How long a client may take to send its body, or to receive a piece of the answer; 0 "
            "is no limit.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _LIMITS.client_s,
) -> ServerOptions:
    """Return the options of the server. Raises `UsageError`."""
    from specgen.server.addresses import is_loopback

    keys = () if api_key_file is None else _keys(api_key_file)
    if not keys and not is_loopback(host) and not insecure_network:
        raise UsageError(
            f"--host {host}: anyone who reaches this address could use the server",
            hint="give --api-key-file, or --insecure-network if that is what you want",
        )
    return ServerOptions(
        host=host,
        port=port,
        alias=alias,
        api_keys=keys,
        cors_origins=tuple(map(_origin, cors_origin or ())),
        limits=Limits(
            body_bytes=limit_body * _MIB,
            prompt_tokens=limit_prompt,
            answer_tokens=limit_tokens,
            n_answers=limit_answers,
            n_waiting=limit_queue,
            request_s=limit_time,
            client_s=limit_client,
        ),
        drain_s=drain_s,
    )


def _keys(path: Path) -> tuple[str, ...]:
    """Read the keys in a file. A header can only have printable ASCII."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--api-key-file {path}: cannot be read: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isprintable()) or " " in line.strip():
            raise UsageError(
                f"--api-key-file {path}: line {number} is not a valid key",
                hint="a key has printable ASCII characters, without spaces",
            )
    if not keys:
        raise UsageError(f"--api-key-file {path}: the file has no key", hint="put one on each line")
    return keys


def _origin(text: str) -> str:
    scheme, separator, host = text.partition("://")
    if text != "*" and (not separator or not host or "/" in host or scheme != scheme.lower()):
        raise UsageError(
            f"--cors-origin {text}: not an origin", hint="give one like https://example.org"
        )
    return text
