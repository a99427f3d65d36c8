"""How the grammars of real JSON schemas treat valid and invalid values: a line for each folder of schemas, and their sum::

    python -m tests.long_runs.schemas FOLDER [PREFIX]

FOLDER is `maskbench/data` of https://github.com/guidance-ai/jsonschemabench; its files hold a schema and values.
Fails if a value that does not conform to a schema is accepted, though no warning names what was left out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from specgen.errors import UsageError
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import JSON_FORM


class _Bytes:
    """A vocabulary of bytes: each text has one way to be written."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 256, None, [256]
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"\xff[end]"]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def examined(path: Path) -> tuple[str, Counter[str], float, list[str]]:
    """Return a schema's fate, the fates of its values, the seconds until its first token, and what to look at."""
    case = json.loads(path.read_text())
    begun = time.perf_counter()
    try:
        grammar, left_out = lenient_schema_grammar(json.dumps(case["schema"]))
        tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])
        compiled = LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)  # type: ignore[arg-type]
        start = LLMatcher(tokenizer, compiled, log_level=0)
        start.compute_bitmask()
    except UsageError as error:
        return "refused", Counter(), time.perf_counter() - begun, [error.message]
    seconds = time.perf_counter() - begun
    if start.is_error():
        return "failed", Counter(), seconds, [start.get_error()]
    is_refused = any(name.startswith("it (") for name in left_out)
    kind = "refused" if is_refused else "in part" if left_out else "in full"
    fates, notes = Counter[str](), [*left_out]
    for number, test in enumerate(case["tests"]):
        value = test["data"]
        text = [*json.dumps(value, ensure_ascii=False).encode(), 256]
        n_taken = start.deep_copy().validate_tokens(text)
        is_taken = n_taken == len(text)
        if not is_taken and test["valid"]:
            ends = _written(start, value, _places(case["schema"]), [2000])
            is_taken = any(end.is_accepting() for end in ends)
            fates["reordered"] += is_taken
        fates["valid" if test["valid"] else "invalid"] += 1
        if is_taken != test["valid"]:
            fates[f"valid rejected, {kind}" if test["valid"] else f"invalid accepted, {kind}"] += 1
            before = bytes(text[max(0, n_taken - 60) : min(n_taken, len(text) - 1)])
            what = "rejected" if test["valid"] else "accepted"
            notes.append(f"value {number} is {what} behind {before.decode(errors='replace')}")
    return kind, fates, seconds, notes


def _places(schema: Any) -> dict[str, int]:
    """Return the names in a schema, and where each comes first."""
    names: dict[str, int] = {}

    def note(pairs: list[tuple[str, Any]]) -> None:
        for name, _ in pairs:
            names.setdefault(name, len(names))

    json.loads(json.dumps(schema), object_pairs_hook=note)
    return names


def _written(
    matcher: LLMatcher, value: Any, places: dict[str, int], budget: list[int]
) -> Iterator[LLMatcher]:
    """Yield the states after a value, written with its properties in some orders."""

    def after(state: LLMatcher, text: str) -> Iterator[LLMatcher]:
        copy, tokens = state.deep_copy(), [*text.encode()]
        budget[0] -= 1
        if budget[0] > 0 and copy.try_consume_tokens(tokens) == len(tokens):
            yield copy

    def rest(state: LLMatcher, todo: list[Any], ending: str, opening: str) -> Iterator[LLMatcher]:
        if not todo:
            yield from after(state, opening + ending if opening in "[{" else ending)
        for number, item in enumerate(todo if ending == "}" else todo[:1]):
            others = todo[:number] + todo[number + 1 :]
            name, inner = item if ending == "}" else ("", item)
            before = opening + (
                f"{json.dumps(name, ensure_ascii=False)}: " if ending == "}" else ""
            )
            for begun in after(state, before):
                for done in _written(begun, inner, places, budget):
                    yield from rest(done, others, ending, ", ")

    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: places.get(pair[0], len(places)))
        yield from rest(matcher, pairs, "}", "{")
    elif isinstance(value, list):
        yield from rest(matcher, value, "]", "[")
    else:
        yield from after(matcher, json.dumps(value, ensure_ascii=False))


def main(arguments: Sequence[str]) -> int:
    folder, prefix = Path(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    paths = sorted(folder.glob(f"{prefix}*.json"))
    kinds, fates, times = Counter[str](), Counter[str](), []
    with ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 1)) as pool:
        for path, (kind, found, seconds, notes) in zip(
            paths, pool.map(examined, paths, chunksize=20), strict=True
        ):
            kinds[kind] += 1
            fates += found
            times.append((seconds, path.name))
            if notes:
                print(f"{path.name}: {kind}: {'; '.join(notes)}"[:600])
    print(dict(kinds), dict(fates))
    print(
        "median", statistics.median(seconds for seconds, _ in times), "worst", sorted(times)[-12:]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
