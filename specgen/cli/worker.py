"""``specgen worker``: offers this machine's devices to targets on other machines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from specgen.system.llama_build import Device

#: Listens on all network addresses, which includes the loopback address.
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - with --insecure-network only
#: The time that a single probe waits for the worker's response.
_PROBE_TIMEOUT_S = 10.0
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
        "The maximum memory to offer on each device, which decides the worker's share of a model.",
        min=1,
        metavar="MIB",
        show_default="all that is free",
    ),
    threads: int | None = option(
        None,
        "--threads -t",
        "Threads for decoding.",
        min=1,
        max=512,
        show_default="the physical cores that it may use",
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
    from specgen.llama.kernels.attached import attached
    from specgen.llama.rpc import load_rpc, offered_devices, serve_devices
    from specgen.system.folders import cache_folder

    # 1. Choose the kernels, and what is offered.
    use_kernels(kernels, output)
    load_rpc()
    folder = cache_folder() / "rpc" if cache else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    max_bytes = None if memory is None else memory * 2**20
    devices = offered_devices(max_bytes)
    own_kernels = attached()
    if own_kernels is not None and own_kernels.computes_products:
        own_kernels.serve()  # compute with the weights that other machines send, too

    # 2. Tell the user what is offered to whom.
    if insecure_network and not is_loopback(host):
        output.note(
            f"anyone who reaches {host}:{port} can read and write this process's memory and run "
            "code in it; nothing is encrypted. Use it in a private network only."
        )
    for device in devices.values():
        output.note(f"offering {_offer(device)}")

    # 3. Serve in a thread until a signal comes.
    endpoint = f"{host}:{port}"
    with Interrupt() as stop:
        out = _redirect_native_stdout(shows=output.verbose > 0)
        left_running.set()  # llama.cpp's server runs until the process ends
        serving = threading.Thread(
            target=serve_devices,
            args=(endpoint, devices, threads or default_threads(), folder),
            daemon=True,
        )
        serving.start()
        has_listened = _wait_for_end(serving, stop, host, port, out)
    if not stop():
        # The server ended without a signal.
        what = "no longer serves" if has_listened else "cannot listen on"
        raise BackendError(f"llama.cpp {what} {endpoint}", hint="--verbose shows llama.cpp's log")
    output.note("the worker has ended; programs that use it have lost it")
    return 0


def _offer(device: Device) -> str:
    """Return in words what a device offers, for a CPU with the kernels that it computes with."""
    from specgen.llama.kernels.attached import computing

    offer = f"{device.name}: {device.description}, {human_bytes(device.free_bytes)}"
    if device.kind == "cpu":
        offer += f", {computing()}"
    return offer


def _wait_for_end(
    serving: threading.Thread,
    stop: Interrupt,
    host: str,
    port: int,
    out: int,
) -> bool:
    """Wait until the worker ends or a signal comes; announce the worker once it answers.

    Args:
        serving: The thread in which the worker runs.
        stop: The flag that a signal sets.
        host: The address that the worker listens on.
        port: The worker's port.
        out: The descriptor of standard output, for the announcement.

    Returns:
        Whether the worker has answered.
    """
    probed_host = "127.0.0.1" if host == _ALL_ADDRESSES else host
    is_listening = False
    while serving.is_alive() and not stop():
        serving.join(_POLL_S)
        if not is_listening:
            with contextlib.suppress(WorkerLostError):
                probe(f"{probed_host}:{port}", _PROBE_TIMEOUT_S)
                is_listening = True
                os.write(out, f"listening on {host}:{port}\n".encode())
    return is_listening


def _check_address(host: str, port: int, *, insecure: bool) -> None:
    """Check the address to listen on.

    Raises:
        UsageError: If it is not a host name or an IPv4 address, or is in use; or if other machines
            can reach it, unless `insecure` is set.
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


def _redirect_native_stdout(*, shows: bool) -> int:
    """Redirect what llama.cpp prints on standard output.

    Args:
        shows: Whether it is shown on standard error; otherwise it is discarded.

    Returns:
        A descriptor of the former standard output.
    """
    sys.stdout.flush()
    former_stdout = os.dup(1)
    replacement = 2 if shows else os.open(os.devnull, os.O_WRONLY)
    os.dup2(replacement, 1)
    return former_stdout
