"""Ask a worker for its protocol, its devices and their memory, without llama.cpp.

Workers use llama.cpp's RPC protocol (ggml/src/ggml-rpc). A request is a command (a byte), the size
of its data (8 bytes), and the data; an answer is a size and data. Numbers are little-endian. A
worker serves one connection at a time. Others get no answer meanwhile, hence the time limit.
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
from specgen.system.llama_build import LIBRARY, protocol_in, stamp_of

# The commands of the protocol.
_HELLO = 14
_DEVICE_COUNT = 15
_GET_DEVICE_MEMORY = 11
#: The size in bytes of a side's capabilities (its transports), which HELLO carries both ways.
_CAPABILITIES_BYTES = 24
_N_PINGS = 5

_START = "is `specgen worker` running there? docs/cluster.md shows how to start it"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports about itself."""

    #: Its address: HOST:PORT.
    endpoint: str
    #: The version of its protocol.
    protocol: str
    #: The free and the total memory of each device, in bytes.
    devices: tuple[tuple[int, int], ...]
    #: The shortest of `_N_PINGS` round trips.
    round_trip_s: float


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return the host and the port of an address, HOST:PORT.

    Raises:
        UsageError: If the text does not have that form.
    """
    host, _, port = text.strip().rpartition(":")
    is_number = port.isascii() and port.isdigit()
    if not host or ":" in host or not is_number or not 0 < int(port) < 65536:
        hint = "give HOST:PORT, for example 127.0.0.1:50052; HOST is a name or an IPv4 address"
        raise UsageError(f"{text!r} is not the address of a worker", hint)
    return host, int(port)


def probe(endpoint: str, timeout_s: float) -> WorkerInfo:
    """Ask a worker about itself.

    Raises:
        WorkerLostError: If it cannot be reached, or does not answer within `timeout_s`.
        UsageError: If `endpoint` is not an address.
    """
    host, port = parse_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rwb") as stream:
                return _ask_worker(stream, endpoint)
    except TimeoutError:
        raise WorkerLostError(
            f"the worker {endpoint} did not answer within {timeout_s:g} s",
            "it serves one program at a time: wait for the other one, or start the worker again",
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise WorkerLostError(f"cannot reach the worker {endpoint}: {reason}", _START) from error


def _ask_worker(stream: io.BufferedRWPair, endpoint: str) -> WorkerInfo:
    """Ask a connected worker about itself; raise `OSError` if it does not follow the protocol."""
    capabilities = bytes(_CAPABILITIES_BYTES)
    hello = _call(stream, _HELLO, capabilities, n_expected=4 + _CAPABILITIES_BYTES)
    # The answer begins with a byte each for the major, minor and patch version.
    protocol = ".".join(str(number) for number in hello[:3])

    n_devices = 0
    round_trip_s = math.inf
    for _ in range(_N_PINGS):
        started_s = time.perf_counter()
        count = _call(stream, _DEVICE_COUNT, b"", n_expected=4)
        round_trip_s = min(round_trip_s, time.perf_counter() - started_s)
        (n_devices,) = struct.unpack("<I", count)

    devices = []
    for index in range(n_devices):
        memory = _call(stream, _GET_DEVICE_MEMORY, struct.pack("<I", index), n_expected=16)
        devices.append(struct.unpack("<QQ", memory))
    return WorkerInfo(endpoint, protocol, tuple(devices), round_trip_s)


def _call(
    stream: io.BufferedRWPair,
    command: int,
    request: bytes,
    n_expected: int,
) -> bytes:
    """Send a command, and return its answer of `n_expected` bytes.

    Raises:
        OSError: If the answer has another size.
    """
    stream.write(struct.pack("<BQ", command, len(request)) + request)
    stream.flush()
    answer = stream.read(8 + n_expected)
    size = answer[:8]
    if size != struct.pack("<Q", n_expected) or len(answer) != 8 + n_expected:
        raise OSError(f"it does not answer as a worker: {size!r}")
    return answer[8:]


def lost_among(endpoints: Sequence[str]) -> Sequence[str]:
    """Return the workers to which this process has no open connection any more.

    The workers themselves cannot be asked, since each serves one connection at a time.

    Returns:
        All of them if none seems to be lost, or if the system does not report connections.
    """
    connected = set()
    with contextlib.suppress(OSError, psutil.Error):
        for connection in psutil.Process().net_connections("tcp4"):
            if connection.status == psutil.CONN_ESTABLISHED:
                connected.add((connection.raddr.ip, connection.raddr.port))
    lost = []
    for endpoint in endpoints:
        host, port = parse_endpoint(endpoint)
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
            addresses = {address for *_, address in infos}
            if connected.isdisjoint(addresses):
                lost.append(endpoint)
    return lost or list(endpoints)


def check_protocol(worker: WorkerInfo) -> None:
    """Check that a worker uses the protocol of the llama.cpp in use, if that is known.

    Raises:
        BackendError: If it uses another one.
    """
    protocol = own_protocol()
    if protocol is not None and worker.protocol != protocol:
        raise BackendError(
            f"the worker {worker.endpoint} uses RPC protocol {worker.protocol}, "
            f"this machine {protocol}",
            hint="install the same version of llama-cpp-python on both machines",
        )


def own_protocol() -> str | None:
    """Return the protocol version of the llama.cpp in use; None if no file records it.

    llama-cpp-python installs the header that defines it; specgen's own library has a stamp.
    """
    package = importlib.util.find_spec("llama_cpp")
    if package is not None and package.origin is not None:
        header = Path(package.origin).parent.parent / "include" / "ggml-rpc.h"
        protocol = protocol_in(header)
        if protocol:
            return protocol
    return stamp_of(Path(__file__).parents[1] / "llama" / LIBRARY).get("protocol")
