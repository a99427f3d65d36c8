r"""Speed of llama-cpp-python's `Llama` with specgen's drafts, with its prompt lookup, and without.

    python benchmarks/adapters.py -m 1.5b.gguf -md 135m.gguf -md 0.5b.gguf \
        --prompts p.jsonl --json out.json

`Llama` generates greedy answers without a draft, with `LlamaPromptLookupDecoding`, and with
`SpecgenDraft` for n-grams and for each draft model. The contenders run in turns: all of them once,
then all of them again. They use the same kernels and number of threads. Loading is not counted, nor
is measuring what decodes cost.

Prints a line for each contender with two speed-ups over `Llama` without a draft: that of whole
answers, prefill included, and that after the first token. Each is the geometric mean of the
speed-ups within a turn. Texts are compared with those without a draft: with specgen's kernels they
are the same; with llama.cpp's they may differ where two tokens are nearly tied.
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

from benchmarks.answers import format_prompt, mean_ratio, n_equal, parser_of, prompts_of, write_json
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
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or default_threads()
    choose_kernels(arguments.kernels, cache_folder())
    contenders = [PLAIN, LOOKUP, "ngram", *map(str, arguments.draft)]
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    texts: list[list[int]] = []
    with Session(
        SessionOptions(arguments.target), time.perf_counter, vocabulary_only=True
    ) as loaded:
        prompts = [format_prompt(loaded, prompt).tokens for prompt in prompts_of(arguments)]
        is_end = loaded.target.vocabulary.is_end
        for turn in range(arguments.turns):
            for contender in contenders:
                with _opened(contender, arguments) as (llama, draft):
                    run = _answers(llama, prompts, arguments.max_tokens, is_end)
                    if draft is not None:
                        run |= _draft_figures(draft)
                texts = texts or run["tokens"]
                run["n_equal"] = n_equal(run.pop("tokens"), texts)
                runs[contender].append(run)
                print(f"turn {turn + 1}: {Path(contender).name}: {run}", file=sys.stderr)
    figures = [
        _figures(Path(contender).name, runs[contender], runs[PLAIN]) for contender in contenders
    ]
    for each in figures:
        print("\t".join(str(each[key]) for key in ("way", "ratio", "ratio_after_first")))
    about = {"target": arguments.target.name, "n_prompts": len(prompts), "ways": figures}
    write_json(arguments.json, about)


@contextlib.contextmanager
def _opened(
    contender: str, arguments: argparse.Namespace
) -> Iterator[tuple[Llama, SpecgenDraft | None]]:
    """Open a contender: a `Llama`, and specgen's draft if it uses one."""
    context = ContextOptions(n_threads=arguments.threads, n_threads_batch=arguments.threads)
    with contextlib.ExitStack() as opened:
        draft = None
        if contender not in (PLAIN, LOOKUP):
            draft = SpecgenDraft(
                arguments.target,
                contender,
                n_ctx=arguments.ctx_size,
                context=context,
                kernels=arguments.kernels,
            )
            opened.enter_context(draft)
        llama = Llama(
            str(arguments.target),
            n_ctx=arguments.ctx_size,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            draft_model=LlamaPromptLookupDecoding() if contender == LOOKUP else draft,
            logits_all=contender != PLAIN,
            # Without flash attention, llama.cpp's results depend on the size of the batch.
            flash_attn=True,
            verbose=False,
        )
        opened.callback(llama.close)
        if draft is not None:
            draft.check(llama)
        yield llama, draft


def _answers(
    llama: Llama, prompts: Sequence[Sequence[int]], n: int, is_end: Callable[[int], bool]
) -> dict[str, Any]:
    """Answer all prompts, one after the other, each with an empty cache.

    Otherwise, `Llama` would reuse the prefix that a prompt shares with the one before it.
    """
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
        # Texts and their lengths may differ, so seconds per token are compared.
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
    contender: str, runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A contender's figures; a ratio above 1 means faster than `Llama` without a draft."""

    def ratio(key: str) -> float:
        return mean_ratio([run[key] for run in runs], [run[key] for run in plain])

    return {
        "way": contender,
        "ratio": round(1.0 / ratio("token_s"), 2),
        "ratio_after_first": round(ratio("tokens_per_s"), 2),
        "turns": list(runs),
    }


if __name__ == "__main__":
    main()
