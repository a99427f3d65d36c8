"""The prompts of the large benchmarks: Spec-Bench's categories and two of our own.

    python benchmarks/sample.py SPEC_BENCH [--count N] > sample.jsonl

The first N (5) of each category of Spec-Bench's questions (arXiv:2401.07851; JSON Lines with
`category` and `turns`), in the order in which the categories first appear there, and N of
ours for writing new code and for editing code.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from specgen.measure.prompts import first_of_each, own_prompts, read_bench_prompts

_MORE = Path(__file__).with_name("prompts.jsonl")
#: Our categories: what a table calls them, and what they are called in either of our files.
_OWN = (("code", "code generation"), ("edit", "code edit"))


def own(n: int) -> Iterator[tuple[str, str]]:
    """The first n prompts of each of our categories, as (category, prompt)."""
    more = read_bench_prompts(_MORE)
    for category, there in _OWN:
        known = [*own_prompts(), *more]
        texts = [prompt.text for prompt in known if prompt.category in (category, there)]
        if len(texts) < n:
            raise SystemExit(f"--count {n}: there are {len(texts)} prompts of ours for {category}")
        yield from ((category, text) for text in texts[:n])


def by_category(prompts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same prompts, category by category."""
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
    asked = parser.parse_args()
    theirs = first_of_each(read_bench_prompts(asked.spec_bench), asked.count)
    prompts = [*((p.category, p.text) for p in theirs), *own(asked.count)]
    for category, text in by_category(prompts):
        print(json.dumps({"category": category, "prompt": text}, ensure_ascii=False))


if __name__ == "__main__":
    main()
