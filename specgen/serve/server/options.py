"""The options of a server: addresses, keys and limits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. 0 is no limit, except for `n_waiting`."""

    #: Bytes of a request's body.
    body_bytes: int = 8 * 1024 * 1024
    #: Tokens of a prompt, and of an answer; both are also limited by the context.
    prompt_tokens: int = 0
    answer_tokens: int = 0
    #: Answers of one request: the number of its prompts times its `n`.
    n_answers: int = 16
    #: Answers that may wait for a free slot; a request that exceeds it is refused with 429.
    n_waiting: int = 64
    #: Seconds from a request to the end of its answers, which are cut then.
    request_s: float = 0.0
    #: Seconds in which a client has to send the head of a request, and its body, and to accept data.
    client_s: float = 60.0
    #: Open connections, as far as the system's limit of descriptors has room for them.
    n_connections: int = 1000


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server."""

    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: int = 8080
    #: The name of the model in answers; None takes its file's.
    alias: str | None = None
    #: Every request needs one of these keys; without keys, everybody who can reach the server may use it.
    api_keys: tuple[str, ...] = ()
    #: Web pages of these origins (``https://example.org``) may use the server in a browser; ``*`` means all.
    cors_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    #: Seconds that unfinished answers have when the server is told to end.
    drain_s: float = 30.0
