r"""A target that is larger than the available memory, compared with llama.cpp's mapped file.

    python -m benchmarks.bigger_target -m 1.5b.gguf --times 5 -o bigger.gguf
    python -m benchmarks.larger_than_memory -m bigger.gguf -md 0.5b.gguf --limit 2.5G \
        --json out.json

Each contender is a process in a control group that limits its memory, page cache included. They
take turns and answer four prompts with 64 tokens each, at temperature 0. Before each answer the
page cache is dropped, so that no contender benefits from what another has read. If the system does
not allow that, a line on stderr says so.

- llama.cpp: its own kernels on the memory-mapped file, without repacking and without drafts. (With
  repacking, it is killed.)
- plain: specgen without drafts. If there are no packed weights yet, this process packs them.
- ngram, and each draft model: specgen with drafts. Each answer starts cold.
- unlimited: the reference, specgen without drafts and without a limit. The other texts must be the
  same as its texts. It runs last and alone, because the files that it maps would stay in the page
  cache for the others. `--no-reference` leaves it out on a machine that has less memory than the
  target.

Prints for each contender the seconds per token after the first token, the tokens per pass, the
bytes read from disk per pass, and how many texts are those of the reference. The speed of the disk
is measured with sequential reads that bypass the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answers import bench_prompts, command_line, format_prompt, parser_of, write_json
from benchmarks.memory_group import GroupError, drop_cache, memory_group
from benchmarks.worker_client import EngineWorker, WorkerCommand, WorkerError, running_worker
from specgen.llama.native_context import default_threads
from specgen.models.files import parts_of
from specgen.options import SessionOptions, parse_size
from specgen.session.session import Session
from specgen.system.disk import read_speed
from specgen.system.folders import packed_folder
from specgen.system.quantities import human_bytes

REFERENCE = "unlimited"
PLAIN = "plain"
LLAMA_CPP = "llama.cpp"
#: How much of the target is read, at most, to measure the speed of the disk, and for how long.
_SPEED_BYTES = 2 * 10**9
_SPEED_S = 5.0


@dataclass(slots=True)
class Contender:
    """A process and its answers."""

    name: str
    worker: EngineWorker
    answers: list[dict[str, Any]] = field(default_factory=list)
    #: The peak memory of its control group, and how many processes were killed in it. Both are
    #: read when the process ends; None without a limit.
    peak_bytes: int | None = None
    n_killed: int | None = None

    def summary(
        self,
        plain: Contender,
        reference: Contender,
        disk_speed: float | None,
    ) -> dict[str, Any]:
        """Return the figures of the answers, compared with plain decoding under the limit.

        Args:
            plain: Plain decoding under the limit.
            reference: The contender whose texts are the correct ones.
            disk_speed: The sequential read speed of the disk in bytes per second; None if unknown.
        """
        token_s = [1.0 / answer["tokens_per_s"] for answer in self.answers]
        plain_s = [1.0 / answer["tokens_per_s"] for answer in plain.answers]
        n_passes = [_n_passes(answer) for answer in self.answers]
        n_tokens = sum(answer["n_tokens"] for answer in self.answers)
        disk_bytes = [answer["disk_bytes"] for answer in self.answers if "disk_bytes" in answer]
        ratios = [other / own for own, other in zip(token_s, plain_s, strict=True)]
        equal = [
            own["token_ids"] == other["token_ids"]
            for own, other in zip(self.answers, reference.answers, strict=True)
        ]
        about = {name: value for name, value in self.worker.about.items() if name != "folder"}
        return {
            "token_s": round(statistics.mean(token_s), 3),
            "times_plain": round(statistics.geometric_mean(ratios), 3),
            "tokens_per_pass": round(n_tokens / sum(n_passes), 2),
            "reads_of_pass_s": self._reads_of_pass_s(disk_speed),
            "disk_bytes_per_pass": round(sum(disk_bytes) / sum(n_passes)) if disk_bytes else None,
            "n_equal": sum(equal),
            "peak_bytes": self.peak_bytes,
            "n_killed": self.n_killed,
            "about": about,
        }

    def _reads_of_pass_s(self, disk_speed: float | None) -> float | None:
        """Return the seconds that the disk needs for the weights that do not fit.

        None if that is unknown.
        """
        streamed_bytes = self.worker.about.get("streamed_bytes")
        if not streamed_bytes or disk_speed is None:
            return None
        return round(float(streamed_bytes) / disk_speed, 3)


def _n_passes(answer: Mapping[str, Any]) -> int:
    """Return the passes over the weights that an answer took, including one for the prompt."""
    if "n_rounds" in answer:
        return int(answer["n_rounds"]) + 1
    # Without drafts each token takes one pass, and the first token comes from the prompt's.
    return int(answer["n_tokens"])


@dataclass(frozen=True, slots=True)
class Setting:
    """How a contender's process is started."""

    name: str
    engine: str
    #: The draft, if the engine is specgen.
    draft: str = "none"
    is_limited: bool = True


def settings_of(drafts: Sequence[Path]) -> list[Setting]:
    """Return the contenders with a limit. Plain decoding is first, because it may have to pack."""
    return [
        Setting(PLAIN, "specgen"),
        Setting("ngram", "specgen", "ngram"),
        *(Setting(draft.name, "specgen", str(draft)) for draft in drafts),
        Setting(LLAMA_CPP, "mapped-llama"),
    ]


@contextlib.contextmanager
def running(
    setting: Setting,
    arguments: argparse.Namespace,
) -> Iterator[Contender]:
    """Start a contender in its control group, and wait until its model is loaded."""
    with contextlib.ExitStack() as stack:
        group = None
        if setting.is_limited and arguments.limit:
            name = setting.name.partition(".")[0]
            group = stack.enter_context(memory_group(name, arguments.limit))
        command = WorkerCommand(setting.engine, group=None if group is None else group.members)
        settings = {
            "target": str(arguments.target),
            "draft": setting.draft,
            "max_tokens": arguments.max_tokens,
            "keeps_learning": False,
            "n_ctx": arguments.ctx_size,
            "n_threads": default_threads(),
        }
        started_s = time.perf_counter()
        worker = stack.enter_context(running_worker(command, settings))
        took_s = time.perf_counter() - started_s
        print(f"{setting.name}: loaded in {took_s:.0f} s, {worker.about}", file=sys.stderr)
        contender = Contender(setting.name, worker)
        yield contender
        if group is not None:
            contender.peak_bytes = group.peak_bytes
            contender.n_killed = group.n_killed


def answer_all(
    contenders: Sequence[Contender],
    texts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    files: Sequence[Path],
) -> bool:
    """Let the contenders take turns to answer all prompts.

    Args:
        contenders: The contenders, which get the answers.
        texts: The prompts.
        tokens: The tokens of each prompt.
        files: The files to drop from the page cache before each answer.

    Returns:
        Whether the whole page cache was dropped before each answer.
    """
    is_dropped = True
    for number, (text, prompt) in enumerate(zip(texts, tokens, strict=True)):
        start = number % len(contenders)  # rotate, so that none always follows the same one
        for contender in (*contenders[start:], *contenders[:start]):
            is_dropped &= drop_cache(files)
            answer = contender.worker.answer(text, prompt)
            if "error" in answer:
                sys.exit(f"{contender.name}: {answer['error']}")
            contender.answers.append(answer)
            token_s = 1.0 / answer["tokens_per_s"]
            print(f"{number + 1}\t{contender.name}\t{token_s:.2f} s per token", file=sys.stderr)
    return is_dropped


def prompt_tokens(target: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize prompts in the target's chat template."""
    options = SessionOptions(target, "none")
    with Session(options, time.perf_counter, vocabulary_only=True) as loaded:
        return [list(format_prompt(loaded, text).tokens) for text in texts]


def report(summaries: Mapping[str, Mapping[str, Any]], n_prompts: int) -> None:
    """Print a line for each contender."""
    for name, summary in summaries.items():
        columns = [
            name,
            f"{summary['token_s']:.2f} s per token",
            f"{summary['times_plain']:.2f}x plain",
            f"{summary['tokens_per_pass']:.2f} tokens per pass",
        ]
        if summary["disk_bytes_per_pass"] is not None:
            columns.append(f"{human_bytes(summary['disk_bytes_per_pass'])} read from disk per pass")
        if summary["reads_of_pass_s"] is not None:
            columns.append(f"{summary['reads_of_pass_s']:.2f} s of reads per pass at full speed")
        columns.append(f"{summary['n_equal']} of {n_prompts} texts equal")
        print("\t".join(columns), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__, max_tokens=64, ctx_size=512, drafts=True)
    parser.add_argument("--limit", type=parse_size, default=parse_size("2.5GB"), metavar="SIZE")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("-N", "--count", type=int, default=4)
    parser.add_argument("--no-reference", action="store_true")
    arguments = parser.parse_args()
    texts = [prompt.text for prompt in bench_prompts(arguments.prompts, None)][: arguments.count]
    files = [arguments.target, *arguments.draft]
    with contextlib.suppress(OSError):
        files += packed_folder().iterdir()
    disk_speed = read_speed(
        parts_of(arguments.target)[0],
        time.perf_counter,
        max_bytes=_SPEED_BYTES,
        max_s=_SPEED_S,
    )
    if disk_speed is not None:
        print(f"disk speed: {human_bytes(int(disk_speed))}/s", file=sys.stderr)
    tokens = prompt_tokens(arguments.target, texts)
    groups = [settings_of(arguments.draft)]
    if not arguments.no_reference:
        groups.append([Setting(REFERENCE, "specgen", is_limited=False)])
    contenders: list[Contender] = []
    is_dropped = True
    try:
        for settings in groups:
            with contextlib.ExitStack() as stack:
                present = [stack.enter_context(running(setting, arguments)) for setting in settings]
                is_dropped &= answer_all(
                    present,
                    texts,
                    tokens,
                    files,
                )
                contenders += present
    except (GroupError, WorkerError) as error:
        sys.exit(f"{error.message}\nhint: {error.hint}" if error.hint else error.message)
    if not is_dropped:
        print("the page cache could not be dropped: speeds may be too high", file=sys.stderr)
    plain = contenders[0]
    reference = plain if arguments.no_reference else contenders[-1]
    summaries = {each.name: each.summary(plain, reference, disk_speed) for each in contenders}
    report(summaries, len(texts))
    write_json(
        arguments.json,
        {
            "command": command_line("larger_than_memory", sys.argv[1:]),
            "limit_bytes": arguments.limit,
            "disk_bytes_per_s": disk_speed,
            "cache_was_dropped": is_dropped,
            "contenders": summaries,
            "answers": {each.name: each.answers for each in contenders},
        },
    )


if __name__ == "__main__":
    main()
