"""What drafting gains where the target's layers are on workers, behind a network of some delay.

    python benchmarks/rpc.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl --json out.json

Starts workers on this machine and puts a proxy before each, which passes on what it gets after the
delay, each way, at the loopback's speed or at that of --mbit, each way of each worker. With every
delay the costs are measured over the wire, as specgen does by itself. Each prompt is answered with
every delay, plain and with the draft, by turns, greedy. A line for each delay and way: tokens a
second after the first one, tokens a round, tokens drafted a round, the ratio to plain decoding with
the same delay, and texts that are plain decoding's without delay.

What a decode costs comes before: seconds by rows, round trips (how often a worker's answer was
waited for), and bytes to and from the workers, for a batch of another size than the one before and
for one of the same.

Prompts whose figures are in the JSON file already are not answered again, so that the benchmark can
be made in parts.
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

DELAYS_MS = (0.0, 1.0, 5.0, 20.0)
ROWS = (1, 2, 4, 8, 16)
_N_REPEATS = 5


def main() -> None:
    asked = _asked()
    choose_kernels("auto", cache_folder())
    prompts = prompts_of(asked)
    report = {
        "target": asked.target.name,
        "draft": asked.draft.name,
        "workers": asked.workers,
        "worker_kernels": asked.worker_kernels,
        "output_here": asked.output_here,
        "mbit": asked.mbit,
        "draft_max": asked.draft_max,
        "decodes": {},
        "runs": [],
    }
    if asked.json is not None and asked.json.exists():
        report = json.loads(asked.json.read_text(encoding="utf-8"))
    with _network(asked.workers, asked.threads, asked.worker_kernels, asked.mbit) as network:
        workers = Workers(network.endpoints, output_here=asked.output_here)
        options = SessionOptions(
            asked.target,
            asked.draft,
            target_context=ContextOptions(workers=workers),
            drafting=DraftOptions(max_tokens=asked.draft_max),
            generation=GenerationOptions(max_tokens=asked.max_tokens),
        )
        _measure(options, network, prompts[: _n_done(report) + asked.more], report, asked.json)
    for line in _lines(report) if report["runs"] else ():
        print("\t".join(line))


def _asked() -> argparse.Namespace:
    parser = parser_of(__doc__, count=6, max_tokens=96)
    parser.add_argument("-md", "--draft", type=Path, required=True)
    parser.add_argument("--more", type=int, default=99, help="of these, answer so many now")
    parser.add_argument("--draft-max", type=int, help="the longest draft")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-t", "--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--worker-kernels", default="auto", help="as `specgen worker` has it")
    parser.add_argument("--output-here", action="store_true", help="as `specgen run` has it")
    parser.add_argument("--mbit", type=float, help="megabits a second")
    return parser.parse_args()


# --- a slow network ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Workers behind proxies.

    `delay` is one way, in seconds; `counts` are bytes to the workers, bytes from them, and answers
    that were waited for.
    """

    endpoints: tuple[str, ...]
    delay: Any
    counts: Any


@contextlib.contextmanager
def _network(n_workers: int, n_threads: int, kernels: str, mbit: float | None) -> Iterator[Network]:
    bytes_per_s = float("inf") if mbit is None else mbit * 1e6 / 8
    delay, counts = multiprocessing.Value("d", 0.0), multiprocessing.Array("q", 3)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # all share this machine's cores
    with contextlib.ExitStack() as stack:
        endpoints = []
        for _ in range(n_workers):
            with socket.create_server(("127.0.0.1", 0)) as trial:
                port = trial.getsockname()[1]
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
    """Pass on what comes to a server, in a process of its own."""
    while True:
        client, _ = server.accept()
        worker = socket.create_connection(("127.0.0.1", port))
        #: Whether the last bytes went to the worker.
        is_asked = threading.Event()
        for source, sink, direction in ((client, worker, 0), (worker, client, 1)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            passing: queue.Queue[tuple[float, bytes]] = queue.Queue(2048)
            for target, arguments in (
                (_take, (source, passing, direction, is_asked, bytes_per_s, delay, counts)),
                (_give, (sink, passing)),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()


def _take(
    source: socket.socket,
    passing: queue.Queue[tuple[float, bytes]],
    direction: int,
    is_asked: threading.Event,
    bytes_per_s: float,
    delay: Any,
    counts: Any,
) -> None:
    data, sent_s = b".", 0.0
    while data:
        try:
            data = source.recv(2**16)
        except OSError:
            data = b""
        sent_s = max(sent_s, time.monotonic()) + len(data) / bytes_per_s
        passing.put((sent_s + delay.value, data))
        with counts.get_lock():
            counts[direction] += len(data)
            if direction == 0:
                is_asked.set()
            elif data and is_asked.is_set():
                is_asked.clear()
                counts[2] += 1


def _give(sink: socket.socket, passing: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, data = passing.get()
        time.sleep(max(0.0, due - time.monotonic()))
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
    """Add what is missing to the report, and write it after each prompt."""
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
    """What decodes of some sizes cost: the quickest of several, since what disturbs only adds."""
    text, found = begin_text(target), []
    for n_rows in ROWS[: sum(rows <= target.n_outputs for rows in ROWS)]:
        times, sent = [], []
        for _ in range(1 + _N_REPEATS):
            before = list(network.counts)
            seconds = time_batch(target, text, n_rows)
            assert seconds is not None
            times.append(seconds)
            sent.append([now - then for now, then in zip(network.counts, before, strict=True)])
        found.append(
            {
                "n_rows": n_rows,
                "seconds": round(min(times[1:]), 4),
                "bytes_to": sent[-1][0],
                "bytes_to_new_size": sent[0][0],
                "bytes_from": sent[-1][1],
                "round_trips": sent[-1][2],
            }
        )
        print(found[-1], file=sys.stderr)
    return found


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
    return len(report["runs"])


def _lines(report: Mapping[str, Any]) -> Iterator[list[str]]:
    for delay_ms in DELAYS_MS:
        for is_plain in (True, False):
            runs = [
                next(r for r in runs if (r["delay_ms"], r["is_plain"]) == (delay_ms, is_plain))
                for runs in report["runs"]
            ]
            plain = [
                next(r for r in runs if (r["delay_ms"], r["is_plain"]) == (delay_ms, True))
                for runs in report["runs"]
            ]
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
