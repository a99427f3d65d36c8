"""Check that the grammars of real JSON schemas accept what conforms, and reject what does not.

    python -m tests.long_runs.schemas FOLDER [PREFIX]

FOLDER is `maskbench/data` of https://github.com/guidance-ai/jsonschemabench; PREFIX selects the
files whose names begin with it. Each file has an object with a ``schema``, and with ``tests`` that
each have ``data`` and whether it is ``valid``.

Prints a line for each schema that is not enforced completely, or whose examples are wrongly
accepted or rejected, and two tables: the second is for ``"strict": false``, which opens objects.
The tables count how schemas are enforced (in full, in part, or refused; a schema that failed is a
defect), and the values of each kind. Fails if a grammar that enforces its whole schema accepts a
value that does not conform.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from specgen.errors import UsageError
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import JSON_FORM

#: The most pieces of a value that are tried to find an order of its properties that the grammar
#: takes.
_BUDGET = 2000


def examined(path: Path, is_open: bool) -> tuple[str, Counter[str], float, list[str]]:
    """Return how a schema is taken, with objects open unless it closes them, the numbers of its
    values, the seconds until a first token, and what is odd.
    """
    case = json.loads(path.read_text())
    begun = time.process_time()
    try:
        grammar, left_out = lenient_schema_grammar(json.dumps(case["schema"]), is_open=is_open)
    except UsageError as error:
        return "refused", Counter(), time.process_time() - begun, [error.message]
    compiled = LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)
    start = LLMatcher(LLTokenizer("byte"), compiled, log_level=0)
    start.compute_bitmask()
    seconds = time.process_time() - begun
    if start.is_error():
        return "failed", Counter(), seconds, [start.get_error()]
    if any(name.startswith("it (") for name in left_out):
        return "refused", Counter(), seconds, [*left_out]
    how = "in part" if left_out else "in full"
    values, notes = Counter[str](), [*left_out]
    for number, test in enumerate(case["tests"]):
        kind = "valid" if test["valid"] else "invalid"
        text = json.dumps(test["data"], ensure_ascii=False).encode()
        matcher = start.deep_copy()
        is_taken = matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()
        if test["valid"] and not is_taken:
            ends = _written(start, test["data"], _orders(case["schema"]), [_BUDGET])
            is_taken = any(end.is_accepting() for end in ends)
        values[f"{kind} values"] += 1
        if is_taken != test["valid"]:
            values[f"{kind} {'accepted' if is_taken else 'rejected'} ({how})"] += 1
            notes.append(f"value {number} is {kind}")
    return how, values, seconds, notes


def _orders(schema: Any) -> list[list[str]]:
    """Return the names of the properties that are listed together in a schema, in its order."""
    found: list[list[str]] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.append([name for name, _ in pairs])

    json.loads(json.dumps(schema), object_pairs_hook=note)
    return found


def _written(
    matcher: LLMatcher, value: Any, orders: list[list[str]], budget: list[int]
) -> Iterator[LLMatcher]:
    """Yield the states after a value, trying several orders of its properties."""

    def after(state: LLMatcher, text: str) -> Iterator[LLMatcher]:
        copy, tokens = state.deep_copy(), [*text.encode()]
        budget[0] -= 1
        if budget[0] > 0 and copy.try_consume_tokens(tokens) == len(tokens):
            yield copy

    def rest(state: LLMatcher, todo: list[tuple[str, Any]], separator: str) -> Iterator[LLMatcher]:
        if not todo:
            yield from after(state, closing)
        for number, (before, item) in enumerate(todo if closing == "}" else todo[:1]):
            for begun in after(state, separator + before):
                for done in _written(begun, item, orders, budget):
                    yield from rest(done, todo[:number] + todo[number + 1 :], ", ")

    if isinstance(value, (dict, list)):
        closing = "}" if isinstance(value, dict) else "]"
        items = [("", item) for item in value]
        if isinstance(value, dict):
            order = max(orders, key=lambda names: len(value.keys() & {*names}))
            names = sorted(value, key=lambda name: [*order, name].index(name))
            items = [(f"{json.dumps(name, ensure_ascii=False)}: ", value[name]) for name in names]
        for opened in after(matcher, "{" if closing == "}" else "["):
            yield from rest(opened, items, "")
    else:
        yield from after(matcher, json.dumps(value, ensure_ascii=False))


def main() -> int:
    """Print what is odd about each schema, and the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="maskbench/data of jsonschemabench")
    parser.add_argument("prefix", nargs="?", default="", help="only files with such names")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob(f"{arguments.prefix}*.json"))
    if not paths:
        sys.exit(f"{arguments.folder} has no file {arguments.prefix}*.json")
    is_right = True
    for is_open in (False, True):
        print('\n"strict": false' if is_open else "closed objects")
        total, seconds = Counter[str](schemas=len(paths)), []
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            results = pool.map(partial(examined, is_open=is_open), paths, chunksize=20)
            for path, (how, values, own_seconds, notes) in zip(paths, results, strict=True):
                total += values + Counter({how: 1})
                seconds.append((own_seconds, path.name))
                if notes:
                    print(f"{path.name}: {how}: {'; '.join(notes)}"[:300])
        seconds.sort()
        for name, number in sorted(total.items()):
            print(f"{number:7} {name}")
        (median, _), (worst, name) = seconds[len(seconds) // 2], seconds[-1]
        print(f"{1000 * median:.1f} ms for the median schema, {worst:.1f} s for {name}")
        is_right &= total["invalid accepted (in full)"] == 0
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
