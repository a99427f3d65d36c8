"""Ask a worker for its protocol, devices and memory, without llama.cpp and with a time limit, by
its protocol (ggml/src/ggml-rpc): a command's byte, then the size of data and data; an answer is a
size and data. Numbers are little-endian. A worker serves one connection at a time; others get no
answer meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from specgen.errors import BackendError, UsageError, WorkerLostError
from specgen.system.machine import LIBRARY, protocol_in, stamp_of

#: The commands, and the size in bytes of the capabilities of the transports, which HELLO carries.
_HELLO, _DEVICE_COUNT, _GET_DEVICE_MEMORY = 14, 15, 11
_CAPABILITIES = 24
_N_PINGS = 5

_START = "is `specgen worker` running there? docs/cluster.md shows how to start it"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's protocol, the free and the whole memory of each device in bytes, and the shortest
    of some round trips.
    """

    endpoint: str
    protocol: str
    devices: tuple[tuple[int, int], ...]
    round_trip_s: float


def parse_endpoint(text: str) -> tuple[str, int]:
    host, separator, port = text.strip().rpartition(":")
    is_number = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not (separator and host and is_number) or ":" in host:
        hint = "give HOST:PORT, for example 127.0.0.1:50052; HOST is a name or an IPv4 address"
        raise UsageError(f"{text!r} is not the address of a worker", hint)
    return host, int(port)


def probe(endpoint: str, timeout_s: float) -> WorkerInfo:
    """Ask a worker what it is. Raise `WorkerLostError`, `UsageError`."""
    host, port = parse_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rwb") as stream:
                return _ask(stream, endpoint)
    except TimeoutError:
        raise WorkerLostError(
            f"the worker {endpoint} does not answer within {timeout_s:g} s",
            "it serves one program at a time: wait for the other one, or start the worker again",
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise WorkerLostError(f"cannot reach the worker {endpoint}: {reason}", _START) from error


def _ask(stream: io.BufferedRWPair, endpoint: str) -> WorkerInfo:
    about = _call(stream, _HELLO, bytes(_CAPABILITIES), 4 + _CAPABILITIES)
    n_devices, round_trip_s = 0, math.inf
    for _ in range(_N_PINGS):
        started = time.perf_counter()
        (n_devices,) = struct.unpack("<I", _call(stream, _DEVICE_COUNT, b"", 4))
        round_trip_s = min(round_trip_s, time.perf_counter() - started)
    devices = []
    for index in range(n_devices):
        answer = _call(stream, _GET_DEVICE_MEMORY, struct.pack("<I", index), 16)
        devices.append(struct.unpack("<QQ", answer))
    protocol = ".".join(str(number) for number in about[:3])
    return WorkerInfo(endpoint, protocol, tuple(devices), round_trip_s)


def _call(stream: io.BufferedRWPair, command: int, request: bytes, n_expected: int) -> bytes:
    stream.write(struct.pack("<BQ", command, len(request)) + request)
    stream.flush()
    answer = stream.read(8 + n_expected)
    if answer[:8] != struct.pack("<Q", n_expected) or len(answer) != 8 + n_expected:
        raise OSError(f"it does not answer as a worker: {answer[:8]!r}")
    return answer[8:]


def lost_among(endpoints: Sequence[str]) -> Sequence[str]:
    """Return the workers without an open connection (all, if unknown): a worker serves one program
    at a time.
    """
    connected = set()
    with contextlib.suppress(OSError, psutil.Error):
        for one in psutil.Process().net_connections("tcp4"):
            if one.status == psutil.CONN_ESTABLISHED:
                connected.add((one.raddr.ip, one.raddr.port))
    lost = []
    for endpoint in endpoints:
        host, port = parse_endpoint(endpoint)
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
            if connected.isdisjoint(address for *_, address in found):
                lost.append(endpoint)
    return lost or list(endpoints)


def check_protocol(worker: WorkerInfo) -> None:
    """Raise `BackendError` if the worker's protocol is not that of the installed llama.cpp."""
    own = own_protocol()
    if own is not None and worker.protocol != own:
        raise BackendError(
            f"the worker {worker.endpoint} has RPC protocol {worker.protocol}, this machine {own}",
            hint="install the same version of llama-cpp-python on both machines",
        )


def own_protocol() -> str | None:
    """Return the protocol version of the llama.cpp in use, if a file beside it says so."""
    found = importlib.util.find_spec("llama_cpp")
    if found is not None and found.origin is not None:
        header = Path(found.origin).parent.parent / "include" / "ggml-rpc.h"
        if protocol := protocol_in(header):
            return protocol
    return stamp_of(Path(__file__).parents[1] / "llama" / LIBRARY).get("protocol")
