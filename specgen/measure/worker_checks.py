"""Check that workers can be used from this machine, for `specgen doctor --rpc`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specgen.errors import SpecgenError
from specgen.measure.doctor import Check
from specgen.system.worker_probe import WorkerInfo, check_protocol, probe

#: The longest that a worker may take to answer, in seconds.
_TIMEOUT_S = 5.0


def worker_checks(
    endpoints: Sequence[str],
    clock: Callable[[], float],
    on_check: Callable[[str], None] = lambda _name: None,
) -> list[Check]:
    """Check the RPC backend of this build, and each worker. `clock` gives seconds, to time round trips.
    `on_check` receives the name of each worker's check before it runs."""
    checks = [_checked("llama.cpp's RPC", _load)]
    for endpoint in endpoints:
        name = f"worker {endpoint}"
        on_check(name)

        def ask(endpoint: str = endpoint) -> str:
            found = probe(endpoint, _TIMEOUT_S, clock)
            check_protocol(found)
            return _about(found)

        checks.append(_checked(name, ask))
    return checks


def _checked(name: str, do: Callable[[], str]) -> Check:
    try:
        message = do()
    except SpecgenError as error:
        kind = type(error).__name__
        return Check(name, passed=False, message=error.message, hint=error.hint, error=kind)
    return Check(name, passed=True, message=message)


def _load() -> str:
    from specgen.llama.rpc import load_rpc

    load_rpc()
    return "can be loaded"


def _about(found: WorkerInfo) -> str:
    """Return a line about a worker: its protocol, devices and round trip."""
    devices = ", ".join(
        f"{device.free_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB free"
        for device in found.devices
    )
    parts = [f"protocol {found.protocol}", devices or "no device"]
    if found.round_trip_s is not None:
        parts.append(f"a round trip takes {found.round_trip_s * 1000:.1f} ms")
    return "; ".join(parts)
