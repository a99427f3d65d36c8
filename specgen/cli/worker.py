"""``specgen worker``: offers this machine's devices to targets on other machines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.model_loading import use_kernels
from specgen.cli.output import Interrupt, Output
from specgen.errors import BackendError, UsageError, WorkerLostError
from specgen.options import KernelOptions
from specgen.serve.server.options import bound_socket, is_loopback
from specgen.system.processes import left_running
from specgen.system.quantities import human_bytes
from specgen.system.worker_probe import probe

_EVERYWHERE = "0.0.0.0"  # noqa: S104 - with --insecure-network only
#: The longest wait for the worker's first response.
_START_S = 10.0
#: The time between two checks for signals.
_POLL_S = 0.1


@flags.takes_options
def worker(
    *,
    host: str = option("127.0.0.1", "--host", "The address to listen on.", metavar="ADDRESS"),
    port: int = option(50052, "--port", "The port.", min=1, max=65535),
    memory: int | None = option(
        None,
        "--memory",
        "The most memory to offer on each device; it decides the worker's share of a model.",
        min=1,
        metavar="MIB",
        show_default="all that is free",
    ),
    threads: int | None = option(
        None, "--threads -t", "Threads.", min=1, max=512, show_default="physical cores"
    ),
    cache: bool = option(
        False, "--cache", "Keep large tensors on this disk, so that a model is sent only once."
    ),
    insecure_network: bool = option(
        False,
        "--insecure-network",
        "Allow an address that other machines can reach; anyone who reaches it controls this "
        "process.",
    ),
    kernels: KernelOptions = flags.kernels.without("--packed-cache"),
    output: Output = flags.loudness,
) -> int:
    """Offer this machine's devices to specgen on other machines (`--rpc`), by llama.cpp's RPC.

    It serves one program at a time. It has neither passwords nor encryption, so it listens on this
    machine only: connect from other machines through a tunnel (ssh -L). Ctrl-C ends it.
    """
    _check_address(host, port, insecure=insecure_network)
    from specgen.llama import default_threads
    from specgen.llama.kernels.attached import attached, computing
    from specgen.llama.rpc import load_rpc, offered_devices, serve_devices
    from specgen.system.folders import cache_folder

    use_kernels(kernels, output)
    load_rpc()
    folder = cache_folder() / "rpc" if cache else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    devices = offered_devices(None if memory is None else memory * 2**20)
    if insecure_network and not is_loopback(host):
        output.note(
            f"anyone who reaches {host}:{port} can read and write this process's memory and run "
            "code in it; nothing is encrypted. Use it in a private network only."
        )
    own = attached()
    if own is not None and own.computes_products:
        own.serve()
    for device in devices.values():
        size = human_bytes(device.free_bytes)
        by = f", {computing()}" if device.kind == "cpu" else ""
        output.note(f"offering {device.name}: {device.description}, {size}{by}")

    endpoint = f"{host}:{port}"
    with Interrupt() as stop:
        out = _native_stdout(shows=output.verbose > 0)
        left_running.set()
        serving = threading.Thread(
            target=serve_devices,
            args=(endpoint, devices, threads or default_threads(), folder),
            daemon=True,
        )
        serving.start()
        has_listened = _wait(serving, stop, host, port, out)
    if not stop():
        what = "no longer serves" if has_listened else "cannot listen on"
        raise BackendError(f"llama.cpp {what} {endpoint}", hint="--verbose shows llama.cpp's log")
    output.note("the worker has ended; programs that use it have lost it")
    return 0


def _wait(serving: threading.Thread, stop: Interrupt, host: str, port: int, out: int) -> bool:
    """Wait until the worker ends or a signal comes; announce it on `out` as soon as it answers.

    Returns:
        Whether it has answered.
    """
    own_host = "127.0.0.1" if host == _EVERYWHERE else host
    is_listening = False
    while serving.is_alive() and not stop():
        serving.join(_POLL_S)
        if not is_listening:
            with contextlib.suppress(WorkerLostError):
                probe(f"{own_host}:{port}", _START_S)
                is_listening = True
                os.write(out, f"listening on {host}:{port}\n".encode())
    return is_listening


def _check_address(host: str, port: int, *, insecure: bool) -> None:
    """Check that the address is free, and, unless `insecure`, that other machines cannot reach it.

    Raises:
        UsageError: It is not.
    """
    if ":" in host:
        raise UsageError(f"--host {host}: not a host name or an IPv4 address")
    if not insecure and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached by other machines, and a worker has no passwords and no "
            "encryption",
            hint="connect through a tunnel (ssh -L) or, in a private network only, add "
            "--insecure-network",
        )
    bound_socket(host, port).close()


def _native_stdout(*, shows: bool) -> int:
    """Redirect llama.cpp's output to standard error, or discard it.

    Returns:
        A descriptor of the former standard output.
    """
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2 if shows else os.open(os.devnull, os.O_WRONLY), 1)
    return out
