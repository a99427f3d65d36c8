"""Worker processes on the loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specgen.system.llama_build import LIBRARY
from tests.helpers.cli import spawn
from tests.helpers.common import ROOT


def has_rpc() -> bool:
    if (ROOT / "specgen" / "llama" / LIBRARY).is_file():
        return True
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    return any((Path(found.origin).parent / "lib").glob("*ggml-rpc*"))


needs_rpc = pytest.mark.skipif(not has_rpc(), reason="llama.cpp's RPC was not built (make rpc)")


@dataclass(frozen=True)
class Worker:
    endpoint: str
    process: subprocess.Popen[str]


#: Below those that systems hand out by themselves: no other test gets a port before it is used
#: here.
_ports = itertools.count(20000 + os.getpid() * 61 % 12000)


def free_port() -> int:
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports do not end")


@contextlib.contextmanager
def running_worker(*arguments: str, port: int | None = None) -> Iterator[Worker]:
    """Run a worker process in the block. Fails if it does not listen."""
    port = port or free_port()
    endpoint = f"127.0.0.1:{port}"
    process = specgen("worker", "--port", str(port), "--threads", "1", *arguments)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening on {endpoint}\n"
        yield Worker(endpoint, process)
    finally:
        process.kill()
        process.communicate()


def specgen(*arguments: str | Path) -> subprocess.Popen[str]:
    return spawn(*arguments, text=True)


def finished(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Wait for a process; return its exit code, stdout and stderr. Fails if it does not end."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"no end within {timeout_s} s: {process.communicate()}")
    return process.returncode, out, err


def wait_for(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until:
            pytest.fail(f"it was not so within {timeout_s} s")
        time.sleep(0.02)
