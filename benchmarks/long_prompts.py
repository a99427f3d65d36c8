r"""Answers to long prompts: plain decoding and drafts in interleaved runs of one engine.

Speeds are tokens per second after the first token.

    python -m benchmarks.long_prompts -m 1.5b.gguf -md smollm2.gguf -md 0.5b.gguf --json out.json
    SPECGEN_KERNELS=llama.cpp python -m benchmarks.long_prompts -m 1.5b.gguf \
        --lengths 1 4 12 --json theirs.json

A prompt consists of thousands of tokens of specgen's own pages and modules (`--lengths`), followed
by a question. The target prefills each document once, and later prompts reuse its KV cache. A
draft's contexts are new for each answer, so its prefill counts. Prints the speed-up of whole
answers and that of their first 60 tokens. `benchmarks/replays.py` can replay the results
(`--answers`) with the prompts that `--prompts-out` writes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.answers import command_line, parser_of, write_json
from specgen.events import CommittedEvent, FinishedEvent
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.measure.prompts import FIXED_NOW
from specgen.options import DraftSource, GenerationOptions, SessionOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.session import Session
from specgen.system.folders import cache_folder
from specgen.text.vocabulary import Vocabulary

_TOP = Path(__file__).parents[1]
#: The length of the beginning of an answer that is timed separately.
_SHORT = 60
#: The part of the context for the question and the chat template.
_EXTRA_TOKENS = 1024
#: The fields of the last event that are written to the results.
_KEPT = [
    "text",
    "token_ids",
    "finish_reason",
    "n_tokens",
    "tokens_per_s",
    "wall_s",
    "prompt_s",
    "n_rounds",
    "n_drafted",
    "n_accepted",
]
_SPEEDS = ("tokens_per_s", "short_tokens_per_s")
QUESTIONS = {
    "summary": "Summarise the text above in some ten sentences.",
    "review": (
        "Review the last module above: name its three weakest places, and say how to mend each of "
        "them."
    ),
    "edit": (
        "Write the last class of the text above once more, whole, and give each of its methods a "
        "docstring."
    ),
    "agent": (
        "You are a coding agent, and your tools have read the files above. Your tools are "
        "read_file(path), edit_file(path, old, new) and run(command). Let the last function above "
        "say in its docstring what it raises. Say in two sentences what you do, and then call one "
        "tool with a JSON object of its name and its arguments."
    ),
}


def document(vocabulary: Vocabulary, n_tokens: int) -> str:
    """The last tokens of a text that alternates pages and modules, and ends with a module."""
    pages = sorted((_TOP / "docs").glob("*.md"))
    modules = sorted((_TOP / "specgen").glob("*/*.py"), key=lambda path: path.name)
    pairs = zip(pages, (each for each in modules if each.stat().st_size > 8000), strict=False)
    files = itertools.chain(*pairs)
    text = "\n\n".join(f"File {each.relative_to(_TOP)}:\n\n{each.read_text()}" for each in files)
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    return b"".join(map(vocabulary.token_bytes, tokens[-n_tokens:])).decode("utf-8", "ignore")


def answer(engine: Engine, session: Session, source: DraftSource, text: str) -> dict[str, Any]:
    """Answer a prompt with a draft whose cache is empty."""
    if source != "none":
        session.draft_source = source
        engine.reload_draft()
        calibrate(session)
    prompt = session.prompts.of_text(text, now=FIXED_NOW)
    first_s = 0.0
    figures: dict[str, Any] = {"n_prompt": len(prompt.tokens), "short_tokens_per_s": 0.0}
    for event in engine.stream(engine.insert(prompt, draft=source != "none")):
        if isinstance(event, CommittedEvent):
            first_s = first_s or event.time_s
            if not figures["short_tokens_per_s"] and event.n_tokens >= _SHORT:
                figures["short_tokens_per_s"] = (event.n_tokens - 1) / (event.time_s - first_s)
        elif isinstance(event, FinishedEvent):
            figures |= {name: asdict(event)[name] for name in (*_KEPT, "draft_s", "undrafted")}
    return figures


def line_of(result: dict[str, Any], plain: dict[str, Any]) -> str:
    """The line to print about an answer."""
    outcome = result["outcome"]
    whole, short = (
        f"{outcome[key] or 0:.1f} tokens/s ({(outcome[key] or 0) / (plain[key] or 1):.2f}x)"
        for key in _SPEEDS
    )
    columns = [
        result["category"],
        result["contender"],
        f"{outcome['n_prompt']} + {outcome['n_tokens']} tokens",
        f"prefill {outcome['prompt_s']:.1f} s",
        whole,
        f"first {_SHORT} tokens: {short}",
    ]
    if not result["is_equal"]:
        columns.append("DIFFERENT TEXT")
    return "\t".join(columns)


def main() -> None:
    parser = parser_of(__doc__, max_tokens=250, drafts=True)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1, 4, 8, 12, 24], help="thousands of tokens"
    )
    parser.add_argument("--kinds", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--prompts-out", type=Path, help="write the prompts to this file")
    arguments = parser.parse_args()
    kernels = choose_kernels(wanted_in(os.environ), cache_folder()).label
    sources: list[DraftSource] = ["none", *arguments.draft]
    generation = GenerationOptions(max_tokens=arguments.max_tokens)
    options = SessionOptions(arguments.target, sources[-1], generation=generation)
    results: list[dict[str, Any]] = []
    prompts: list[dict[str, str]] = []
    n_ctx = 1000 * max(arguments.lengths) + arguments.max_tokens + _EXTRA_TOKENS
    with Session(options, time.perf_counter) as session, Engine(session, n_ctx=n_ctx) as engine:
        calibrate(session)
        for source in sources:  # warm up
            answer(engine, session, source, "Count from one to twenty.")
        for length, kind in itertools.product(arguments.lengths, arguments.kinds):
            text = f"{document(session.target.vocabulary, 1000 * length)}\n\n{QUESTIONS[kind]}"
            prompts.append({"category": f"{length}k {kind}", "prompt": text})
            plain: dict[str, Any] = {}
            for source in sources:
                outcome = answer(engine, session, source, text)
                plain = plain or outcome
                name = source.name if isinstance(source, Path) else "plain"
                results.append(
                    {
                        "contender": name,
                        "is_plain": source == "none",
                        "category": f"{length}k {kind}",
                        "prompt": len(prompts),
                        "temperature": 0.0,
                        "is_equal": outcome["token_ids"] == plain["token_ids"],
                        "outcome": outcome,
                    }
                )
                report = {
                    "command": command_line("long_prompts", sys.argv[1:]),
                    "kernels": kernels,
                    "results": results,
                }
                write_json(arguments.json, report)
                print(line_of(results[-1], plain), flush=True)
    if arguments.prompts_out is not None:
        arguments.prompts_out.write_text("".join(f"{json.dumps(each)}\n" for each in prompts))


if __name__ == "__main__":
    main()
