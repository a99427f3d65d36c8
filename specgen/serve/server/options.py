"""The options of a server: addresses, keys and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from specgen.options import option, utf8

_limit = partial(option, panel="Limits of a request", min=0)
_server = partial(option, panel="Server")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. 0 is no limit, except for `n_waiting`."""

    #: Bytes of a request's body.
    body_bytes: int = 8 * 1024 * 1024
    prompt_tokens: int = _limit(
        0,
        "--limit-prompt",
        "Length of a prompt; 0 is as long as fits into the context.",
        metavar="TOKENS",
    )
    answer_tokens: int = _limit(
        0,
        "--limit-tokens",
        "Length of an answer; 0 is as long as fits into the context.",
        metavar="TOKENS",
    )
    n_answers: int = _limit(
        16,
        "--limit-answers",
        "Answers to one request (its prompts times its n); 0 is no limit.",
        metavar="N",
    )
    n_waiting: int = _limit(
        64,
        "--limit-queue",
        "Answers that may wait; further requests get status 429.",
        metavar="N",
    )
    request_s: float = _limit(
        0.0,
        "--limit-time",
        "Time from a request to the end of its answers; they are cut off then. 0 is no limit.",
        metavar="SECONDS",
    )
    client_s: float = _limit(
        60.0,
        "--limit-client",
        "How long a client may take to send the head of a request, or its body, or to receive a piece "
        "of the answer; 0 is no limit.",
        metavar="SECONDS",
    )
    n_connections: int = option(
        1000,
        "--limit-connections",
        "Open connections. If there are more, the one that has been silent for longest is closed, or "
        "the newest gets status 503 if all are being answered.",
        panel="Limits of a request",
        min=1,
        metavar="N",
        show_default="1000, or fewer if the system's limit of descriptors is lower",
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server."""

    host: str = _server(
        "127.0.0.1",
        "--host",
        "The address to listen on. An address that other machines can reach needs --api-key-file.",
        metavar="ADDRESS",
    )
    port: int = _server(
        8080, "--port", "The port to listen on; 0 picks a free one.", min=0, max=65535
    )
    alias: str | None = _server(
        None,
        "--alias -a",
        "The model's name in responses.",
        metavar="NAME",
        parse=utf8,
        show_default="its file's",
    )
    #: Every request needs one of these keys; without keys, everybody who can reach the server may use it.
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = _server(
        (),
        "--cors-origin",
        "Let web pages of this origin (for example https://example.org; * is any) use the server; may "
        "be given several times.",
        metavar="ORIGIN",
        show_default="none",
    )
    limits: Limits = field(default_factory=Limits)
    drain_s: float = _server(
        30.0,
        "--drain-s",
        "How long unfinished answers may go on after SIGTERM.",
        min=0.0,
        metavar="SECONDS",
    )
