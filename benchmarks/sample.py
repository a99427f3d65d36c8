"""Write the prompts of the large benchmarks: Spec-Bench's categories and two of our own.

    python benchmarks/sample.py SPEC_BENCH [--count N] > sample.jsonl

The output has the first N (default: 5) questions of each category of Spec-Bench (arXiv:2401.07851),
in the order in which the categories appear there, and N of our own prompts for each of two more
categories: writing new code, and editing code. SPEC_BENCH is a file of JSON lines with `category`
and `turns`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from specgen.measure.prompts import first_of_each, own_prompts, read_bench_prompts

_MORE = Path(__file__).with_name("prompts.jsonl")
#: Our categories: the name in tables and in one of our files of prompts, and that in the other.
_OWN = (("code", "code generation"), ("edit", "code edit"))


def own_categories(n: int) -> Iterator[tuple[str, str]]:
    """Yield the first n prompts of each of our categories, as (category, prompt)."""
    prompts = [*own_prompts(), *read_bench_prompts(_MORE)]
    for names in _OWN:
        category = names[0]
        texts = [prompt.text for prompt in prompts if prompt.category in names]
        if len(texts) < n:
            raise SystemExit(f"--count {n}: there are only {len(texts)} prompts for {category}")
        yield from ((category, text) for text in texts[:n])


def by_category(prompts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the same prompts, category by category."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for category, text in prompts:
        groups.setdefault(category, []).append((category, text))
    return [prompt for group in groups.values() for prompt in group]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("spec_bench", type=Path)
    parser.add_argument("--count", type=int, default=5)
    arguments = parser.parse_args()
    theirs = first_of_each(read_bench_prompts(arguments.spec_bench), arguments.count)
    prompts = [*((p.category, p.text) for p in theirs), *own_categories(arguments.count)]
    for category, text in by_category(prompts):
        print(json.dumps({"category": category, "prompt": text}, ensure_ascii=False))


if __name__ == "__main__":
    main()
