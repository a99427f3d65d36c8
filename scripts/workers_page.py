"""The page docs/benchmarks/rpc.md: a target on workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from scripts.benchmark_tables import Figures, model, ms, number, raw, read, table


def parts() -> list[str]:
    found = [
        (
            "`python benchmarks/rpc.py -m TARGET -md SMOLLM2 --prompts benchmarks/prompts.jsonl -N 6 -n 96` (five of the six): two "
            "workers on this machine (`specgen worker`, two threads each), each behind a proxy that delays the data "
            "in both directions. The draft, SmolLM2, runs outside of the workers. Greedy. specgen measures its "
            "costs over the network with every delay, as it does by itself, and answers each prompt "
            "with every delay, with and without drafts, in turn."
        )
    ]
    for name, kernels in (
        ("rpc-15.json", "specgen's kernels"),
        ("rpc-15-llama.json", "llama.cpp's code"),
    ):
        report = read(name)
        found += [
            f"## {model(report['target'])}, workers with {kernels} ({raw(name)})",
            "Milliseconds for a decode of n rows, and its number of round trips to a worker:",
            table([*_decode_rows(report)]),
        ]
        if report["runs"]:
            found += [
                "Tokens per second after the first token; geometric means of the answers.",
                table([*_delay_rows(report)]),
            ]
    found += [
        "## A slower network",
        (
            "The proxies pass on 1,000 megabits a second in each direction to each worker. `--output-here` keeps the "
            "output matrix outside of the workers. Decodes with a delay of 1 ms, and the data on the network; "
            "if a batch has another size than the one before, llama.cpp sends its graph again."
        ),
        table([*_network_rows()]),
    ]
    return found


def _decode_rows(report: Figures) -> Iterator[list[str]]:
    decodes = report["decodes"]
    sizes = [str(decode["n_rows"]) for decode in next(iter(decodes.values()))]
    yield ["delay, each way", "round trips", *sizes]
    for delay_ms, found in decodes.items():
        times = [ms(1000 * decode["seconds"]) for decode in found]
        yield [f"{float(delay_ms):g} ms", str(found[0]["round_trips"]), *times]


def _delay_rows(report: Figures) -> Iterator[list[str]]:
    yield [
        *("delay, each way", "plain, tokens/s", "with drafts", "ratio"),
        *("tokens a round", "drafted a round", "texts equal"),
    ]
    for delay_ms in report["decodes"]:
        runs = {
            is_plain: [
                run
                for answer in report["runs"]
                for run in answer
                if run["delay_ms"] == float(delay_ms) and run["is_plain"] == is_plain
            ]
            for is_plain in (True, False)
        }
        plain, drafts = (
            statistics.geometric_mean(run["tokens_per_s"] for run in runs[is_plain])
            for is_plain in (True, False)
        )
        n_rounds = sum(run["n_rounds"] for run in runs[False])
        n_equal = sum(run["is_equal"] for run in (*runs[True], *runs[False]))
        yield [
            f"{float(delay_ms):g} ms",
            f"{plain:.1f}",
            f"{drafts:.1f}",
            number(drafts / plain),
            number(sum(run["n_tokens"] - 1 for run in runs[False]) / n_rounds),
            number(sum(run["n_drafted"] for run in runs[False]) / n_rounds),
            f"{n_equal} of {2 * len(runs[True])}",
        ]


def _network_rows() -> Iterator[list[str]]:
    yield [
        *("", "1 row, ms", "8 rows, ms", "to the workers, 1 row", "8 rows", "graph"),
        *("from them, 1 row", "8 rows"),
    ]
    for name, where in (
        ("rpc-15-gbit.json", "all on the workers"),
        ("rpc-15-gbit-here.json", "`--output-here`"),
    ):
        found = {decode["n_rows"]: decode for decode in read(name)["decodes"]["1.0"]}
        one, eight = found[1], found[8]
        graph = eight["bytes_to_new_size"] - eight["bytes_to"]
        sizes = (one["bytes_to"], eight["bytes_to"], graph, one["bytes_from"], eight["bytes_from"])
        yield [
            f"{where} ({raw(name)})",
            *(ms(1000 * decode["seconds"]) for decode in (one, eight)),
            *map(_kilobytes, sizes),
        ]


def _kilobytes(n: int) -> str:
    return f"{n / 1000:.0f} kB" if n < 1e6 else f"{n / 1e6:.1f} MB"
