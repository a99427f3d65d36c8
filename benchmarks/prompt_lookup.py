"""specgen's n-grams and llama-cpp-python's prompt lookup, in interleaved runs.

    python benchmarks/prompt_lookup.py -m 1.5b.gguf --prompts p.jsonl --json out.json

Prints the lines of `specgen bench` for plain decoding, for n-grams, and for prompt lookup with
drafts of 2 and of 10 tokens, the lengths that llama-cpp-python's documentation recommends for CPUs
and for GPUs. `--json` gets all results. Decoding is greedy.

Each answer of prompt lookup is generated in a separate process, which is this module with
`--child`: it gets a job as JSON on stdin, and writes one line of JSON to stdout. This is because
`Llama` with a drafter needs much memory (it keeps the logits of every position in the context), and
because a crash must not end the benchmark. The speed is computed as for specgen: the number of
tokens after the first one, divided by the time after the first one. The loop `Llama.generate` is
measured, without the conversion of tokens to text that completions add.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerError, run_program
from specgen.llama import default_threads
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.measure.benchmark import Contender, Outcome, contender_of
from specgen.measure.prompts import FIXED_NOW
from specgen.session.session import Session
from specgen.system.folders import cache_folder

#: The lengths of drafts that llama-cpp-python's documentation recommends for CPUs and for GPUs.
LENGTHS = (2, 10)
#: The context size is a multiple of this.
_CONTEXT_STEP = 256


def main() -> None:
    # Imported here, because the child process does not need them.
    from benchmarks.answers import bench_prompts, opened, parser_of
    from benchmarks.peers import compare

    parser = parser_of(__doc__, max_tokens=128)
    parser.add_argument("--prompts", type=Path, help="default: the prompts of `specgen bench`")
    parser.add_argument("-N", "--count", type=int, help="prompts per category")
    arguments = parser.parse_args()
    kernels = choose_kernels(wanted_in(os.environ), cache_folder()).label
    prompts = bench_prompts(arguments.prompts, arguments.count)
    with (
        opened(arguments.target, "none", arguments.max_tokens) as plain,
        opened(arguments.target, "ngram", arguments.max_tokens) as ngrams,
    ):
        contenders = [contender_of("plain", plain), contender_of("ngram", ngrams)]
        for n in LENGTHS:
            lookup = partial(answer_by_lookup, plain, n)
            contenders.append(Contender(0.0, f"llama-cpp-python lookup {n}", lookup))
        compare(contenders, prompts, kernels, arguments.json)


def answer_by_lookup(session: Session, n_drafted_max: int, prompt: str) -> Outcome:
    """Answer with llama-cpp-python's `LlamaPromptLookupDecoding`.

    The session supplies only prompts and options.
    """
    options = session.options
    job = LookupJob(
        target=str(options.target),
        prompt=session.prompts.of_text(prompt, now=FIXED_NOW).tokens,
        n_tokens=options.generation.max_tokens,
        n_threads=options.target_context.n_threads or default_threads(),
        n_drafted_max=n_drafted_max,
        n_gpu_layers=options.target_context.n_gpu_layers,
        flash_attention=options.target_context.flash_attention != "off",
    )
    return run_lookup(job)


@dataclass(frozen=True, slots=True)
class LookupJob:
    """An answer to generate greedily with prompt lookup."""

    target: str
    #: The tokens with which specgen would begin.
    prompt: tuple[int, ...]
    n_tokens: int
    n_threads: int
    #: The length of a draft. llama-cpp-python's default is 10; it recommends 2 on a CPU.
    n_drafted_max: int = 10
    ngram_max: int = 2
    n_gpu_layers: int = -1
    #: Off by default in `Llama`, while llama.cpp itself uses it where it can.
    flash_attention: bool = True


def run_lookup(job: LookupJob) -> Outcome:
    """Generate an answer with llama-cpp-python, in a separate process.

    Raises:
        PeerError: If it fails or takes too long.
    """
    command = (sys.executable, "-m", "benchmarks.prompt_lookup", "--child")
    stdout, _ = run_program(command, stdin=json.dumps(asdict(job)))
    try:
        figures = json.loads(stdout.splitlines()[-1])
        figures["token_ids"] = tuple(figures["token_ids"])
        return Outcome(**figures, finish_reason=None, time_to_first_token_s=None)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise PeerError("llama-cpp-python's prompt lookup printed no figures") from error


class CountingDrafter:
    """Counts the tokens that a drafter of llama-cpp-python drafts, and those that are accepted."""

    def __init__(self, drafter: Callable[[Any], Any]) -> None:
        self._drafter = drafter
        #: The length of the text at the last draft, and of that draft.
        self._n_text = 0
        self._n_draft = 0
        self.n_drafted = 0
        self.n_accepted = 0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        """Draft tokens after `input_ids`, the text so far, all of which is committed."""
        self.settle(len(input_ids))
        draft = self._drafter(input_ids)
        self._n_text = len(input_ids)
        self._n_draft = len(draft)
        return draft

    def settle(self, n_text: int) -> None:
        """Count the tokens of the last draft that were accepted.

        All tokens since that draft are accepted ones, except for one, which the target added.

        Args:
            n_text: The number of tokens that the text has now.
        """
        if self._n_draft:
            self.n_drafted += self._n_draft
            self.n_accepted += min(self._n_draft, max(0, n_text - self._n_text - 1))
        self._n_draft = 0


def answer(job: LookupJob, clock: Callable[[], float]) -> dict[str, Any]:
    """Load the model and generate; return some fields of an `Outcome`."""
    from specgen.llama.vocabulary import LlamaVocabulary

    drafter, model = _open(job)
    vocabulary = LlamaVocabulary(model.model)
    times_s: list[float] = []
    token_ids: list[int] = []
    for token_id in model.generate(job.prompt, temp=0.0):
        times_s.append(clock())
        token_ids.append(int(token_id))
        if len(token_ids) == job.n_tokens or vocabulary.is_end(token_ids[-1]):
            break
    drafter.settle(len(job.prompt) + len(token_ids))
    seconds = times_s[-1] - times_s[0]
    pieces = (vocabulary.token_bytes(token) for token in token_ids if not vocabulary.is_end(token))
    return {
        "text": b"".join(pieces).decode("utf-8", "replace"),
        "token_ids": token_ids[:-1] if vocabulary.is_end(token_ids[-1]) else token_ids,
        "n_tokens": len(token_ids),
        "tokens_per_s": (len(token_ids) - 1) / seconds if seconds else None,
        "n_drafted": drafter.n_drafted,
        "n_accepted": drafter.n_accepted,
    }


def _open(job: LookupJob) -> tuple[CountingDrafter, Any]:
    """Return the drafter and a `Llama`, warmed up and empty."""
    from specgen.llama.library import llama_cpp

    drafter = CountingDrafter(
        llama_cpp.llama_speculative.LlamaPromptLookupDecoding(
            max_ngram_size=job.ngram_max, num_pred_tokens=job.n_drafted_max
        )
    )
    n_ctx = len(job.prompt) + job.n_tokens + job.n_drafted_max
    make_llama: Any = llama_cpp.Llama  # typed for subclasses of its own drafter
    model = make_llama(
        model_path=job.target,
        n_ctx=-(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP,
        n_threads=job.n_threads,
        n_threads_batch=job.n_threads,
        n_gpu_layers=job.n_gpu_layers,
        flash_attn=job.flash_attention,
        # Otherwise there is space for the logits of one batch only, and a later one fails.
        logits_all=True,
        verbose=False,
        draft_model=drafter,
    )
    # Warm up, as llama.cpp's programs do.
    model.eval(job.prompt[-1:])
    model.reset()
    return drafter, model


def answer_job() -> None:
    """Answer the job on stdin."""
    job = json.load(sys.stdin)
    job["prompt"] = tuple(job["prompt"])
    sys.stdout.write(json.dumps(answer(LookupJob(**job), time.perf_counter)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        answer_job()
    else:
        main()
