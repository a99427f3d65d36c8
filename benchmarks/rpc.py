"""Speed-up by drafts with the target's layers on workers, over a network with some delay.

    python benchmarks/rpc.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl --json out.json

Starts workers on this machine, with a proxy in front of each that forwards all data after a delay.
The delay applies in each direction; --mbit limits the bandwidth of each worker in each direction.
With each delay, the costs of decodes are measured over this network, as specgen always does. Then
each prompt is answered with each delay, plainly and with the draft, in interleaved runs at
temperature 0.

First, decodes of several sizes are measured: seconds, round trips (how often the answer of a worker
was waited for), and bytes to and from the workers. The bytes to the workers are also given for a
batch whose size differs from the one before.

Prints a line for each delay, plain and with drafts: tokens per second after the first token, tokens
per round, drafted tokens per round, the ratio to plain decoding with the same delay, and the number
of texts that are the same as with plain decoding without delay.

Prompts whose figures are already in the JSON file are not answered again, so the benchmark can be
run in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.answers import answer, mean_ratio, parser_of, prompts_of, write_json
from specgen.llama import LlamaBackend
from specgen.llama.kernels.admission import choose_kernels
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SessionOptions,
    Workers,
)
from specgen.session.calibration import begin_text, time_batch
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from specgen.system.folders import cache_folder

#: Delays in each direction.
DELAYS_MS = (0.0, 1.0, 5.0, 20.0)
#: Batch sizes of the decodes that are measured.
ROWS = (1, 2, 4, 8, 16)
_N_REPEATS = 5


def main() -> None:
    arguments = _parse_arguments()
    choose_kernels("auto", cache_folder())
    prompts = prompts_of(arguments)
    report = {
        "target": arguments.target.name,
        "draft": arguments.draft.name,
        "workers": arguments.workers,
        "worker_kernels": arguments.worker_kernels,
        "output_here": arguments.output_here,
        "mbit": arguments.mbit,
        "draft_max": arguments.draft_max,
        "decodes": {},
        "runs": [],
    }
    if arguments.json is not None and arguments.json.exists():
        report = json.loads(arguments.json.read_text(encoding="utf-8"))
    with _network(
        arguments.workers, arguments.threads, arguments.worker_kernels, arguments.mbit
    ) as network:
        workers = Workers(network.endpoints, output_here=arguments.output_here)
        options = SessionOptions(
            arguments.target,
            arguments.draft,
            target_context=ContextOptions(workers=workers),
            drafting=DraftOptions(max_tokens=arguments.draft_max),
            generation=GenerationOptions(max_tokens=arguments.max_tokens),
        )
        _measure(
            options, network, prompts[: _n_done(report) + arguments.more], report, arguments.json
        )
    for line in _lines(report) if report["runs"] else ():
        print("\t".join(line))


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, count=6, max_tokens=96)
    parser.add_argument("-md", "--draft", type=Path, required=True)
    parser.add_argument("--more", type=int, default=99, help="prompts to answer in this run")
    parser.add_argument("--draft-max", type=int, help="maximum tokens of a draft")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--worker-kernels", default="auto", help="--kernels of `specgen worker`")
    parser.add_argument("--output-here", action="store_true", help="as in `specgen run`")
    parser.add_argument("--mbit", type=float, help="bandwidth in megabits per second")
    return parser.parse_args()


# --- a slow network ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Workers behind proxies. The proxies share two values with this process."""

    endpoints: tuple[str, ...]
    #: A shared number: the delay in each direction, in seconds.
    delay: Any
    #: A shared array: the bytes to the workers, the bytes from them, and the answers that were
    #: waited for.
    counts: Any


@contextlib.contextmanager
def _network(n_workers: int, n_threads: int, kernels: str, mbit: float | None) -> Iterator[Network]:
    bytes_per_s = float("inf") if mbit is None else mbit * 1e6 / 8
    delay = multiprocessing.Value("d", 0.0)
    counts = multiprocessing.Array("q", 3)
    # All workers share this machine's cores, so idle threads must not spin.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with contextlib.ExitStack() as stack:
        endpoints = []
        for _ in range(n_workers):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            command = [sys.executable, "-m", "specgen", "worker", "--port", str(port), "--quiet"]
            command += ["--threads", str(n_threads), "--kernels", kernels]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            stack.callback(worker.kill)
            assert worker.stdout is not None
            worker.stdout.readline()
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            proxy = multiprocessing.Process(
                target=_proxy, args=(server, port, bytes_per_s, delay, counts), daemon=True
            )
            proxy.start()
            stack.callback(proxy.kill)
            endpoints.append(f"127.0.0.1:{server.getsockname()[1]}")
        yield Network(tuple(endpoints), delay, counts)


def _proxy(server: socket.socket, port: int, bytes_per_s: float, delay: Any, counts: Any) -> None:
    """Forward connections between a server and a worker. Runs in a separate process."""
    while True:
        client, _ = server.accept()
        worker = socket.create_connection(("127.0.0.1", port))
        # Set while the last data went to the worker.
        is_waiting = threading.Event()
        for source, sink, direction in ((client, worker, 0), (worker, client, 1)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            in_transit: queue.Queue[tuple[float, bytes]] = queue.Queue(2048)
            for target, arguments in (
                (_receive, (source, in_transit, direction, is_waiting, bytes_per_s, delay, counts)),
                (_deliver, (sink, in_transit)),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()


def _receive(
    source: socket.socket,
    in_transit: queue.Queue[tuple[float, bytes]],
    direction: int,
    is_waiting: threading.Event,
    bytes_per_s: float,
    delay: Any,
    counts: Any,
) -> None:
    """Put what a socket receives into a queue, with the time at which it arrives."""
    data = b"."
    #: When the bandwidth limit lets the last data leave.
    sent_s = 0.0
    while data:
        try:
            data = source.recv(2**16)
        except OSError:
            data = b""
        sent_s = max(sent_s, time.monotonic()) + len(data) / bytes_per_s
        in_transit.put((sent_s + delay.value, data))
        with counts.get_lock():
            counts[direction] += len(data)
            if direction == 0:
                is_waiting.set()
            elif data and is_waiting.is_set():
                is_waiting.clear()
                counts[2] += 1


def _deliver(sink: socket.socket, in_transit: queue.Queue[tuple[float, bytes]]) -> None:
    """Send the data of a queue when their time has come."""
    while True:
        arrival_s, data = in_transit.get()
        time.sleep(max(0.0, arrival_s - time.monotonic()))
        with contextlib.suppress(OSError):
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)


# --- measuring -----------------------------------------------------------------------------------


def _measure(
    options: SessionOptions,
    network: Network,
    prompts: list[str],
    report: dict[str, Any],
    file: Path | None,
) -> None:
    """Measure what is missing in the report, and write it after each prompt."""
    with contextlib.ExitStack() as stack:
        sessions: dict[tuple[float, DraftSource], Session] = {}
        for delay_ms in DELAYS_MS:
            measurements = MeasurementStore()
            for draft in ("none", options.draft):
                loaded = Session(_with_draft(options, draft), time.perf_counter, measurements)
                sessions[delay_ms, draft] = stack.enter_context(loaded)
            if str(delay_ms) not in report["decodes"]:
                network.delay.value = delay_ms / 1000
                with sessions[delay_ms, "none"].contexts(512) as (target, _):
                    report["decodes"][str(delay_ms)] = _decodes(target, network)
                write_json(file, report)
        for prompt in prompts[_n_done(report) :]:
            runs = []
            for (delay_ms, draft), loaded in sessions.items():
                network.delay.value = delay_ms / 1000
                run = _answer(loaded, prompt)
                runs.append({"delay_ms": delay_ms, "is_plain": draft == "none", **run})
                print({**runs[-1], "text": "", "costs_s": ""}, file=sys.stderr)
            for run in runs:
                run["is_equal"] = run["text"] == runs[0]["text"]
            report["runs"].append(runs)
            write_json(file, report)


def _with_draft(options: SessionOptions, draft: DraftSource) -> SessionOptions:
    if draft != "none":
        return options
    return SessionOptions(
        options.target,
        "none",
        target_context=options.target_context,
        generation=options.generation,
    )


def _decodes(target: LlamaBackend, network: Network) -> list[dict[str, Any]]:
    """Measure decodes of several sizes.

    The fastest of several repeats counts, because other programs can only slow a decode down.
    """
    text = begin_text(target)
    decodes = []
    for n_rows in ROWS:
        if n_rows > target.n_outputs:
            break
        times = []
        sent = []
        # The first one follows a batch of another size.
        for _ in range(1 + _N_REPEATS):
            before = list(network.counts)
            seconds = time_batch(target, text, n_rows)
            assert seconds is not None
            times.append(seconds)
            sent.append([now - then for now, then in zip(network.counts, before, strict=True)])
        decodes.append(
            {
                "n_rows": n_rows,
                "seconds": round(min(times[1:]), 4),
                "bytes_to": sent[-1][0],
                "bytes_to_new_size": sent[0][0],
                "bytes_from": sent[-1][1],
                "round_trips": sent[-1][2],
            }
        )
        print(decodes[-1], file=sys.stderr)
    return decodes


def _answer(session: Session, prompt: str) -> dict[str, Any]:
    finished = answer(session, prompt)
    known = session.costs.table().known
    return {
        "n_tokens": finished.n_tokens,
        "n_rounds": finished.n_rounds,
        "n_drafted": finished.n_drafted,
        "n_accepted": finished.n_accepted,
        "drafted_by_depth": finished.drafted_by_depth,
        "tokens_per_s": round(finished.tokens_per_s or 0.0, 3),
        "first_token_s": round(finished.time_to_first_token_s or 0.0, 3),
        "draft_s": round(finished.draft_s, 3),
        "target_s": round(finished.target_s - finished.prompt_s, 3),
        "own_s": round(finished.loop_s, 3),
        "costs_s": {n_rows: round(session.costs.table().seconds(n_rows), 4) for n_rows in known},
        "text": finished.text,
    }


# --- figures -------------------------------------------------------------------------------------


def _n_done(report: Mapping[str, Any]) -> int:
    """The number of prompts that were answered."""
    return len(report["runs"])


def _runs_of(
    report: Mapping[str, Any], delay_ms: float, *, is_plain: bool
) -> list[Mapping[str, Any]]:
    """The runs with a delay, plain or with drafts, one for each prompt."""
    return [
        next(run for run in runs if (run["delay_ms"], run["is_plain"]) == (delay_ms, is_plain))
        for runs in report["runs"]
    ]


def _lines(report: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the columns of each line to print."""
    for delay_ms in DELAYS_MS:
        plain = _runs_of(report, delay_ms, is_plain=True)
        for is_plain in (True, False):
            runs = _runs_of(report, delay_ms, is_plain=is_plain)
            n_rounds = sum(run["n_rounds"] for run in runs)
            speeds = [run["tokens_per_s"] for run in runs]
            figures = (
                geometric_mean(speeds),
                sum(run["n_tokens"] - 1 for run in runs) / n_rounds,
                sum(run["n_drafted"] for run in runs) / n_rounds,
                mean_ratio(speeds, [run["tokens_per_s"] for run in plain]),
            )
            yield [
                f"{delay_ms:g} ms",
                "plain" if is_plain else "drafts",
                *(f"{figure:.2f}" for figure in figures),
                f"{sum(run['is_equal'] for run in runs)} of {len(runs)}",
            ]


if __name__ == "__main__":
    main()
