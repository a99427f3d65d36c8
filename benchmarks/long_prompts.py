r"""Answers behind long prompts: plain decoding and drafts by turns in one engine, tokens per second after the first token.

    python -m benchmarks.long_prompts -m 1.5b.gguf -md smollm2.gguf -md 0.5b.gguf --json out.json
    SPECGEN_KERNELS=llama.cpp python -m benchmarks.long_prompts -m 1.5b.gguf --lengths 1 4 12 --json theirs.json

A prompt is so many thousand tokens of specgen's own pages and modules, and a question: a summary, a review, an edit, an
agent's turn. The target reads each document once; what comes after it finds it in the cache. The draft's contexts are
new for each answer, so that its prefill counts. The speed of an answer's first 60 tokens and that of all of it are those
of one run. Texts are compared with plain decoding's.

The results have the form of `specgen bench --json`: `benchmarks/replays.py` replays them with the `--prompts-out` file.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.answers import parser_of, write_json
from specgen.events import CommittedEvent, FinishedEvent
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.measure.prompts import NOW, BenchPrompt
from specgen.method.backend import Vocabulary
from specgen.models.files import cache_folder
from specgen.options import ContextOptions, DraftSource, GenerationOptions, SessionOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.session import Session

_TOP = Path(__file__).parents[1]
_SHORT = 60
_ROOM = 1024
QUESTIONS = {
    "summary": "Summarise the text above in some ten sentences.",
    "review": "Review the last module above: name its three weakest places, and say how to mend each of them.",
    "edit": "Write the last class of the text above once more, whole, and give each of its methods a docstring.",
    "agent": "You are a coding agent, and your tools have read the files above. Your tools are read_file(path), "
    "edit_file(path, old, new) and run(command). Let the last function above say in its docstring what it raises. Say "
    "in two sentences what you do, and then call one tool with a JSON object of its name and its arguments.",
}


def documents(vocabulary: Vocabulary, n_tokens: int) -> str:
    """The last `n_tokens` tokens of pages and modules in turn, which end with a module."""
    pages = sorted((_TOP / "docs").glob("*.md"))
    modules = sorted((_TOP / "specgen").glob("*/*.py"), key=lambda path: path.name)
    pairs = zip(pages, (each for each in modules if each.stat().st_size > 8000), strict=False)
    files = [path for pair in pairs for path in pair]
    text = "\n\n".join(f"File {each.relative_to(_TOP)}:\n\n{each.read_text()}" for each in files)
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    return b"".join(map(vocabulary.token_bytes, tokens[-n_tokens:])).decode("utf-8", "ignore")


def prompts_of(
    vocabulary: Vocabulary, lengths: list[int], kinds: list[str]
) -> Iterator[BenchPrompt]:
    """A prompt of each kind behind each document."""
    numbers = itertools.count(1)
    for length in lengths:
        document = documents(vocabulary, 1000 * length)
        for kind in kinds:
            yield BenchPrompt(
                next(numbers), f"{length}k {kind}", f"{document}\n\n{QUESTIONS[kind]}"
            )


def answer(engine: Engine, session: Session, source: DraftSource, text: str) -> dict[str, Any]:
    """Answer a prompt with a draft that has read nothing; return what `specgen bench` keeps of it, and more."""
    if source != "none":
        session.draft_source = source
        engine.reload_draft()
        calibrate(session)
    prompt = session.prompts.of_text(text, now=NOW)
    request = engine.insert(prompt, draft=source != "none")
    begun, short, last = 0.0, None, None
    for event in engine.stream(request):
        if isinstance(event, CommittedEvent):
            begun = begun or event.time_s
            if short is None and event.n_tokens >= _SHORT:
                short = (event.n_tokens - 1) / (event.time_s - begun)
        elif isinstance(event, FinishedEvent):
            last = asdict(event)
    assert last is not None, "an answer was made"
    names = [
        "text",
        "token_ids",
        "finish_reason",
        "n_tokens",
        "tokens_per_s",
        "wall_s",
        "prompt_s",
        "n_rounds",
        "n_drafted",
    ]
    names += ["n_accepted", "draft_s", "target_s", "undrafted"]
    return {name: last[name] for name in names} | {"n_prompt": len(prompt.tokens), "short": short}


def main() -> None:
    parser = parser_of(__doc__, max_tokens=250, drafts=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4, 8, 12, 24])
    parser.add_argument("--kinds", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--prompts-out", type=Path, help="write the prompts there")
    asked = parser.parse_args()
    kernels = choose_kernels(wanted_in(os.environ), cache_folder()).label
    sources: list[DraftSource] = ["none", *asked.draft]
    options = SessionOptions(
        asked.target,
        sources[-1],
        generation=GenerationOptions(max_tokens=asked.max_tokens),
        target_context=ContextOptions(n_threads=asked.threads),
        draft_context=ContextOptions(n_threads=asked.threads),
    )
    results: list[dict[str, Any]] = []
    with Session(options, time.perf_counter) as session:
        calibrate(session)
        prompts = list(prompts_of(session.target.vocabulary, asked.lengths, asked.kinds))
        if asked.prompts_out is not None:
            lines = (
                json.dumps({"prompt": each.text, "category": each.category}) for each in prompts
            )
            asked.prompts_out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with Engine(session, n_ctx=1000 * max(asked.lengths) + asked.max_tokens + _ROOM) as engine:
            for source in sources:  # nothing is measured cold
                answer(engine, session, source, "Count from one to twenty.")
            for prompt in prompts:
                plain: dict[str, Any] = {}
                for source in sources:
                    name = source.name if isinstance(source, Path) else "plain"
                    outcome = answer(engine, session, source, prompt.text)
                    plain = plain or outcome
                    speeds = [outcome[key] / plain[key] for key in ("short", "tokens_per_s")]
                    equal = outcome["token_ids"] == plain["token_ids"]
                    results.append(
                        {"is_plain": source == "none", "contender": name, "temperature": 0.0}
                        | {"prompt": prompt.number, "category": prompt.category, "equal": equal}
                        | {"speedups": speeds, "outcome": outcome}
                    )
                    print(
                        f"{prompt.category}\t{name}\t{outcome['n_prompt']} + {outcome['n_tokens']} tokens",
                        f"read in {outcome['prompt_s']:.1f} s\t{outcome['tokens_per_s']:.1f} tokens/s",
                        f"{speeds[0]:.2f}\t{speeds[1]:.2f}\t{'' if equal else 'OTHER TEXT'}",
                        sep="\t",
                        flush=True,
                    )
                    write_json(
                        asked.json,
                        {"command": sys.argv, "kernels": kernels, "results": results},
                    )


if __name__ == "__main__":
    main()
