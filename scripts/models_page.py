"""The page docs/models.md: what works with each architecture, as `make architectures` found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.architectures.exceptions import EXCEPTIONS

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "architectures.jsonl"
#: The section about targets that do not fit into memory. It is written here, since the rest of the
#: page is generated.
LARGER_THAN_MEMORY = (
    "## Larger than memory",
    (
        "A target that is larger than memory can be used, too: as many of its weights as fit stay "
        "in memory, and the rest is read from disk in every pass over the model, ahead of the "
        "computation. The output is the same, bit for bit. Before the first answer, a note tells "
        "what to expect:"
    ),
    (
        "    note: 19.2 GB of weights, 10.1 GB of memory: 9.8 GB are read from disk per pass, "
        "about 6 s; with drafts about 1.2 s a token"
    ),
    (
        "**Speed.** A pass takes as long as its reads: the bytes that do not fit, divided by the "
        "speed of the disk. It takes hardly longer for 60 tokens than for one. Drafts therefore "
        "save more time here than anywhere else, and specgen drafts more tokens: use a draft "
        "model. The draft always stays in memory. `specgen serve` and `specgen batch` generate "
        "several answers per pass, and prompts are prefilled in batches as large as memory allows."
    ),
    (
        "**Memory.** The weights may use what is available, within the limits of the container, "
        "minus the draft, the KV caches and a reserve. `--weights-memory 10G` sets that size, and "
        "`--weights-memory all` refuses a target that does not fit (exit code 8). A smaller "
        "context (`-c`) leaves more memory for weights. `specgen models list` shows how much of a "
        "model would be read from disk."
    ),
    (
        "**Disk space.** On first use, the weights are packed into a file in the cache folder. "
        "This takes minutes, but is needed only once. The file is about as large as the model, and "
        "may take up half of the free space. If there is too little, a note says so, and the "
        "model's own file is read as it is needed, which is several times slower. "
        "`specgen doctor` shows the folder and its free space; `specgen models clear` deletes "
        "the files."
    ),
    (
        "**Limits.** For mixtures of experts, and on macOS and Windows for all models, llama.cpp "
        "maps the model's file, and the operating system decides what stays in memory. With a GPU "
        "or with workers (`--rpc`), the model has to fit."
    ),
)
#: The checks that compare texts.
TEXTS = ("n-gram", "model", "wrong draft", "tree", "full context", "four sequences", "fuzz")


@dataclass(slots=True)
class CheckResults:
    """The results of the checks of an architecture."""

    loads: bool = False
    #: Whether sequences can share a beginning, as trees of drafts need.
    can_branch: bool = False
    passed: set[str] = field(default_factory=set)
    #: The checks that failed, each with its reasons by (weight type, kernels).
    failed: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)

    def add(self, line: Mapping[str, object]) -> None:
        """Add the results of one weight type and one kind of kernels."""
        variant = str(line["type"]), str(line["by"])
        passed = line["passed"]
        failed = line["failed"]
        assert isinstance(passed, list)
        assert isinstance(failed, dict)
        self.loads |= "load" in passed
        self.can_branch |= bool(line["can_branch"])
        self.passed |= set(passed)
        for check, detail in failed.items():
            self.failed.setdefault(check, {})[variant] = detail


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parts(file: Path = FILE) -> list[str]:
    """Return the parts of the page below its title."""
    head, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    results: dict[str, CheckResults] = {}
    for line in lines:
        results.setdefault(line["name"], CheckResults()).add(line)
    loaded = {name: each for name, each in results.items() if each.loads}
    exact = [name for name, each in loaded.items() if not _failing_texts(each)]
    invariant = [name for name, each in loaded.items() if "rows" not in each.failed]
    sound = {name for name, each in loaded.items() if not each.failed}
    return [
        (
            "specgen runs the architectures of llama.cpp "
            f"(llama-cpp-python {head['llama-cpp-python']}). "
            "`make architectures` tests each with a small random model, in F32 and in Q4_K_M, with "
            f"specgen's kernels and with llama.cpp's. Of {len(loaded)} variants that generate "
            f"text, {len(exact)} are exact in every test, and {len(invariant)} are batch-invariant "
            "with specgen's kernels."
        ),
        (
            "- **exact**: at temperature 0, the output is the same as with plain decoding. This is "
            "tested with n-grams, with a draft that usually agrees, with one that never does, with "
            "trees, up to a full context, and with four answers at once. With llama.cpp's kernels, "
            "a near-tie counts as the same output ([what lossless means](lossless.md)).\n"
            "- **batch-invariant**: with specgen's kernels, a token's logits are bit for bit the "
            "same in batches of 2 to 33 tokens as on their own.\n"
            "- **\\***: a mixture of experts."
        ),
        "## Exact and batch-invariant",
        (
            "With drafts as chains or trees: "
            f"{_names(name for name in sound if loaded[name].can_branch)}."
        ),
        (
            "With drafts as chains only, because branches cannot share a recurrent state: "
            f"{_names(name for name in sound if not loaded[name].can_branch)}."
        ),
        "## With exceptions",
        table([*_rows({name: each for name, each in loaded.items() if name not in sound})]),
        "## Not tested",
        (
            "These do not generate text, or llama.cpp cannot create or run the model that its "
            "tests describe."
        ),
        table([*_not_run(name for name, each in results.items() if not each.loads)]),
        *LARGER_THAN_MEMORY,
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(_title, names)))


def _rows(loaded: Mapping[str, CheckResults]) -> Iterator[Sequence[str]]:
    yield "architecture", "exact", "batch-invariant", "exceptions"
    for name in sorted(loaded, key=_title):
        each = loaded[name]
        yield (
            _title(name),
            "no" if _failing_texts(each) else "yes",
            "no" if "rows" in each.failed else "yes",
            "; ".join(_exceptions(name, each)),
        )


def _failing_texts(each: CheckResults) -> set[str]:
    return set(TEXTS) & set(each.failed)


def _exceptions(name: str, each: CheckResults) -> Iterator[str]:
    """Yield the known reasons why checks fail, each after the names of its checks."""
    for known in EXCEPTIONS:
        checks = [check for check in known.checks if check in each.failed]
        if name in known.names and checks:
            operator = f" (`{known.operator}`)" if known.operator else ""
            yield f"{', '.join(checks)}: {known.reason}{operator}"


def _not_run(names: Iterable[str]) -> Iterator[Sequence[str]]:
    yield "why", "architectures"
    reasons = {name: known.reason for known in EXCEPTIONS for name in known.names}
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(reasons.get(name, ""), []).append(name)
    for reason, names_of_reason in sorted(by_reason.items()):
        yield reason, _names(names_of_reason)


def _title(name: str) -> str:
    """Return the name as people write it, with an asterisk for a mixture of experts."""
    title = name.removesuffix("-moe")
    return title if title == name else f"{title}\\*"
