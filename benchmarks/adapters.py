r"""How fast llama-cpp-python's `Llama` is with specgen's drafts, its own prompt lookup, and none.

    python benchmarks/adapters.py -m 1.5b.gguf -md 135m.gguf -md 0.5b.gguf \
        --prompts p.jsonl --json out.json

Greedy answers of `Llama` without a draft, with `LlamaPromptLookupDecoding`, and with `SpecgenDraft`
of n-grams and of each draft model, by turns (every way once, then every way again). A line for each
way has two ratios, which compare seconds of a token with those without a draft in the same turn: of
whole answers, prompts included, and behind the first token. Given is the geometric mean of the
turns. All ways have the same kernels and as many threads; loading is not counted, nor is measuring
what models cost. Texts are compared with those without a draft: they are the same with specgen's
kernels, and may differ in a near-tie with llama.cpp's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.answers import begin, mean_ratio, n_equal, parser_of, prompts_of, write_json
from specgen.llama.kernels.admission import choose_kernels
from specgen.llama.native_context import default_threads
from specgen.options import ContextOptions, SessionOptions
from specgen.serve.adapters.llama_cpp import SpecgenDraft
from specgen.session.session import Session
from specgen.system.folders import cache_folder

PLAIN, LOOKUP = "Llama", "LlamaPromptLookupDecoding"


def main() -> None:
    parser = parser_of(__doc__, count=15, max_tokens=128, ctx_size=2048, drafts=True)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--kernels", choices=("auto", "specgen", "llama.cpp"), default="auto")
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    asked.threads = asked.threads or default_threads()
    choose_kernels(asked.kernels, cache_folder())
    ways = [PLAIN, LOOKUP, "ngram", *map(str, asked.draft)]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    texts: list[list[int]] = []
    with Session(SessionOptions(asked.target), time.perf_counter, vocabulary_only=True) as loaded:
        prompts = [begin(loaded, prompt).tokens for prompt in prompts_of(asked)]
        is_end = loaded.target.vocabulary.is_end
        for turn in range(asked.turns):
            for way in ways:
                with _opened(way, asked) as (llama, draft):
                    run = _answers(llama, prompts, asked.max_tokens, is_end)
                    if draft is not None:
                        run |= _draft_figures(draft)
                texts = texts or run["tokens"]
                run["n_equal"] = n_equal(run.pop("tokens"), texts)
                runs[way].append(run)
                print(f"turn {turn + 1}: {Path(way).name}: {run}", file=sys.stderr)
    figures = [_figures(Path(way).name, runs[way], runs[PLAIN]) for way in ways]
    for each in figures:
        print("\t".join(str(each[key]) for key in ("way", "ratio", "ratio_behind_first")))
    about = {"target": asked.target.name, "n_prompts": len(prompts), "ways": figures}
    write_json(asked.json, about)


@contextlib.contextmanager
def _opened(way: str, asked: argparse.Namespace) -> Iterator[tuple[Llama, SpecgenDraft | None]]:
    """A `Llama` of one way, and specgen's draft in it, if it has one."""
    context = ContextOptions(n_threads=asked.threads, n_threads_batch=asked.threads)
    with contextlib.ExitStack() as opened:
        draft = None
        if way not in (PLAIN, LOOKUP):
            draft = SpecgenDraft(
                asked.target,
                way,
                n_ctx=asked.ctx_size,
                context=context,
                kernels=asked.kernels,
            )
            opened.enter_context(draft)
        llama = Llama(
            str(asked.target),
            n_ctx=asked.ctx_size,
            n_threads=asked.threads,
            n_threads_batch=asked.threads,
            draft_model=LlamaPromptLookupDecoding() if way == LOOKUP else draft,
            logits_all=way != PLAIN,
            flash_attn=True,  # without it, llama.cpp's attention rounds rows otherwise in a batch
            verbose=False,
        )
        opened.callback(llama.close)
        if draft is not None:
            draft.check(llama)
        yield llama, draft


def _answers(
    llama: Llama, prompts: Sequence[Sequence[int]], n: int, is_end: Callable[[int], bool]
) -> dict[str, Any]:
    """Answer all prompts, one after the other, each anew: `Llama` would keep what two share."""
    whole_s = first_s = 0.0
    answers = []
    for prompt in prompts:
        llama.reset()  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        answer: list[int] = []
        for token in llama.generate(prompt, temp=0.0):
            if not answer:
                first_s += time.perf_counter() - started
            answer.append(token)
            if len(answer) == n or is_end(token):
                break
        whole_s += time.perf_counter() - started
        answers.append(answer)
    n_tokens = sum(map(len, answers))
    return {
        "n_tokens": n_tokens,
        # Texts may differ, and in their lengths too: seconds of a token can be compared.
        "token_s": round(whole_s / n_tokens, 5),
        "first_s": round(first_s, 2),
        "tokens_per_s": round((n_tokens - len(answers)) / (whole_s - first_s), 1),
        "tokens": answers,
    }


def _draft_figures(draft: SpecgenDraft) -> dict[str, Any]:
    tally = draft.tally
    return {
        "n_drafted": tally.n_drafted,
        "n_accepted": tally.n_accepted,
        "draft_s": round(tally.draft_s, 2),
    }


def _figures(
    way: str, runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A way's figures; ratios above 1 are quicker than `Llama` without a draft."""

    def ratio(key: str) -> float:
        return mean_ratio([run[key] for run in runs], [run[key] for run in plain])

    return {
        "way": way,
        "ratio": round(1.0 / ratio("token_s"), 2),
        "ratio_behind_first": round(ratio("tokens_per_s"), 2),
        "turns": list(runs),
    }


if __name__ == "__main__":
    main()
