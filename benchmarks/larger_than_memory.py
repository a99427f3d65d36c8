r"""A target that is larger than the memory that it may use, against llama.cpp's mapped file.

    python -m benchmarks.bigger_target -m 1.5b.gguf --times 5 -o bigger.gguf
    python -m benchmarks.larger_than_memory -m bigger.gguf -md 0.5b.gguf --limit 2.5G \
        --json out.json

Each contender is a process in a control group of its own, whose memory is limited; the cache of
files counts. They answer four prompts in turns, with 64 tokens each, greedily. Before each answer
the system's cache of files is dropped, so that no contender profits from what another has read. A
line on standard error says so if the system does not allow that.

- llama.cpp: its own code on the mapped file, without repacking and without drafts. (With repacking,
  it is killed.)
- plain: specgen without drafts. If there are no packed weights yet, this process packs them.
- ngram, and each draft model: specgen with drafts. Each answer begins without knowledge of the
  others.
- unlimited: specgen without drafts and without a limit. Its texts are those that the others have to
  have. It answers last, alone: what it maps would stay in the cache of files for the others.
  `--no-reference` leaves it out on a machine that has less memory than the target.

It prints, for each contender, the seconds per token after the first one, the tokens and the bytes
read from the disk per pass, and how many texts are those of the reference. The speed of the disk is
that of reads in sequence, past the cache of files.
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

from benchmarks.answers import begin, bench_prompts, command_line, parser_of, write_json
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
#: How much of the target is read to measure the disk.
_SPEED_BYTES = 2 * 10**9
_SPEED_S = 5.0


@dataclass(slots=True)
class Contender:
    """A process and its answers."""

    name: str
    worker: EngineWorker
    answers: list[dict[str, Any]] = field(default_factory=list)
    #: The most memory that its control group used, and how many processes were killed in it. They
    #: are counted when it ends; None without a limit.
    peak_bytes: int | None = None
    n_killed: int | None = None

    def summary(
        self,
        plain: Contender,
        reference: Contender,
        disk_speed: float | None,
    ) -> dict[str, Any]:
        """Return what the answers come to, compared with plain decoding under the limit.

        Args:
            plain: Plain decoding under the limit.
            reference: Whose texts the others have to have.
            disk_speed: The bytes per second that the disk reads in sequence; None if unknown.
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
        """Return the seconds in which the disk reads what does not fit; None if that is unknown."""
        streamed_bytes = self.worker.about.get("streamed_bytes")
        if not streamed_bytes or disk_speed is None:
            return None
        return round(float(streamed_bytes) / disk_speed, 3)


def _n_passes(answer: Mapping[str, Any]) -> int:
    """Return how often the weights were read for an answer, once of them for its prompt."""
    if "n_rounds" in answer:
        return int(answer["n_rounds"]) + 1
    return int(answer["n_tokens"])  # one by one, and the first is that of the prompt


@dataclass(frozen=True, slots=True)
class Setting:
    """How a contender's process is started."""

    name: str
    engine: str
    #: What drafts, if it is specgen.
    draft: str = "none"
    is_limited: bool = True


def settings_of(drafts: Sequence[Path]) -> list[Setting]:
    """Return the contenders with a limit; plain decoding comes first, since it may have to pack."""
    return [
        Setting(PLAIN, "specgen"),
        Setting("ngram", "specgen", "ngram"),
        *(Setting(draft.name, "specgen", str(draft)) for draft in drafts),
        Setting(LLAMA_CPP, "mapped-llama"),
    ]


@contextlib.contextmanager
def running(
    setting: Setting,
    asked: argparse.Namespace,
) -> Iterator[Contender]:
    """Start a contender in its group, with its model loaded."""
    with contextlib.ExitStack() as stack:
        group = None
        if setting.is_limited and asked.limit:
            name = setting.name.partition(".")[0]
            group = stack.enter_context(memory_group(name, asked.limit))
        command = WorkerCommand(setting.engine, group=None if group is None else group.members)
        settings = {
            "target": str(asked.target),
            "draft": setting.draft,
            "max_tokens": asked.max_tokens,
            "keeps_learning": False,
            "n_ctx": asked.ctx_size,
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
    """Let the contenders answer all prompts in turns.

    Args:
        contenders: The contenders, to whom the answers are added.
        texts: The prompts.
        tokens: The tokens of each prompt.
        files: The files that are read, whose cache is dropped.

    Returns:
        Whether the whole cache of files was dropped before each answer.
    """
    is_dropped = True
    for number, (text, prompt) in enumerate(zip(texts, tokens, strict=True)):
        start = number % len(contenders)  # nobody is always before another one
        for contender in (*contenders[start:], *contenders[:start]):
            is_dropped &= drop_cache(files)
            answer = contender.worker.answer(text, prompt)
            if "error" in answer:
                sys.exit(f"{contender.name}: {answer['error']}")
            contender.answers.append(answer)
            token_s = 1.0 / answer["tokens_per_s"]
            print(f"{number + 1}\t{contender.name}\t{token_s:.2f} s a token", file=sys.stderr)
    return is_dropped


def prompt_tokens(target: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of prompts in the target's chat template."""
    options = SessionOptions(target, "none")
    with Session(options, time.perf_counter, vocabulary_only=True) as loaded:
        return [list(begin(loaded, text).tokens) for text in texts]


def report(summaries: Mapping[str, Mapping[str, Any]], n_prompts: int) -> None:
    """Print a line for each contender."""
    for name, summary in summaries.items():
        columns = [
            name,
            f"{summary['token_s']:.2f} s a token",
            f"{summary['times_plain']:.2f} x plain",
            f"{summary['tokens_per_pass']:.2f} tokens per pass",
        ]
        if summary["disk_bytes_per_pass"] is not None:
            columns.append(f"{human_bytes(summary['disk_bytes_per_pass'])} from the disk per pass")
        if summary["reads_of_pass_s"] is not None:
            columns.append(f"{summary['reads_of_pass_s']:.2f} s at the disk's speed")
        columns.append(f"{summary['n_equal']} of {n_prompts} texts equal")
        print("\t".join(columns), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__, max_tokens=64, ctx_size=512, drafts=True)
    parser.add_argument("--limit", type=parse_size, default=parse_size("2.5GB"), metavar="SIZE")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("-N", "--count", type=int, default=4)
    parser.add_argument("--no-reference", action="store_true")
    asked = parser.parse_args()
    texts = [prompt.text for prompt in bench_prompts(asked.prompts, None)][: asked.count]
    files = [asked.target, *asked.draft]
    with contextlib.suppress(OSError):
        files += packed_folder().iterdir()
    disk_speed = read_speed(
        parts_of(asked.target)[0],
        time.perf_counter,
        max_bytes=_SPEED_BYTES,
        max_s=_SPEED_S,
    )
    if disk_speed is not None:
        print(f"the disk reads {human_bytes(int(disk_speed))} a second", file=sys.stderr)
    tokens = prompt_tokens(asked.target, texts)
    groups = [settings_of(asked.draft)]
    if not asked.no_reference:
        groups.append([Setting(REFERENCE, "specgen", is_limited=False)])
    contenders: list[Contender] = []
    is_dropped = True
    try:
        for settings in groups:
            with contextlib.ExitStack() as stack:
                present = [stack.enter_context(running(setting, asked)) for setting in settings]
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
        print("the cache of files could not be dropped: speeds may be too high", file=sys.stderr)
    plain = contenders[0]
    reference = plain if asked.no_reference else contenders[-1]
    summaries = {each.name: each.summary(plain, reference, disk_speed) for each in contenders}
    report(summaries, len(texts))
    write_json(
        asked.json,
        {
            "command": command_line("larger_than_memory", sys.argv[1:]),
            "limit_bytes": asked.limit,
            "disk_bytes_per_s": disk_speed,
            "cache_was_dropped": is_dropped,
            "contenders": summaries,
            "answers": {each.name: each.answers for each in contenders},
        },
    )


if __name__ == "__main__":
    main()
