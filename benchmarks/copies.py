"""What copies of draft models in Q4_0 cost, and how often they say what the target said.

    specgen bench -m target.gguf --draft ngram --prompts FILE --json answers.json
    python benchmarks/copies.py --target target.gguf --prompts FILE --answers answers.json DRAFT...

For each draft and for a copy of it, as `--draft-weights auto` makes it: milliseconds by the number of
rows as `benchmarks/costs.py` has them, and at how many places of the recorded answers of plain decoding its
most likely token is the answer's. Prints one JSON object each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.answers import begin
from benchmarks.costs import measure
from benchmarks.replays import Told, parser_of_answers, read_answers
from specgen.llama import default_threads, requantize
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.models import cache_folder
from specgen.options import SessionOptions
from specgen.session.loaded_models import Models
from specgen.session.measurements import agreement_walk

#: Tokens before the batches that are timed.
N_CONTEXT = 200


def main() -> None:
    parser = parser_of_answers(__doc__)
    parser.add_argument("drafts", nargs="+", type=Path)
    asked = parser.parse_args()
    kernels = choose_kernels(wanted_in(os.environ), cache_folder()).computes
    answers = read_answers(asked.answers, asked.prompts, asked.count)
    for draft in asked.drafts:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / f"{draft.stem}.q4_0.gguf"
            started = time.perf_counter()
            requantize(draft, copy, default_threads())
            made_s = time.perf_counter() - started
            for model, seconds in ((draft, None), (copy, round(made_s, 1))):
                found = {
                    "model": model.name,
                    "mb": round(model.stat().st_size / 1e6),
                    "made_s": seconds,
                    "ms": measure(model, kernels, N_CONTEXT, default_threads())["ms"],
                    **agreement(asked.target, model, answers),
                }
                print(json.dumps(found), flush=True)


def agreement(target: Path, draft: Path, answers: Sequence[Told]) -> dict[str, float]:
    """At how many places of the answers a draft says what they say."""
    n_places = n_agreed = 0
    with Models(SessionOptions(target, draft), time.perf_counter) as loaded:
        for number, told in enumerate(answers, 1):
            prompt = begin(loaded, told.prompt.text)
            tokens = [*prompt.tokens, *told.tokens]
            with loaded.contexts(loaded.context_size(len(tokens))) as (_, drafting):
                assert drafting is not None, "the session's draft"
                walk = agreement_walk(loaded, prompt, drafting)
                for place in range(len(prompt.tokens), len(tokens)):
                    walk.look(tokens, place, tokens[place])
            n_places += walk.found.n_places
            n_agreed += walk.found.n_agreed
            print(
                f"{draft.name}: {number} of {len(answers)}", file=sys.stderr, end="\r", flush=True
            )
    return {"n_places": n_places, "agreement": round(n_agreed / n_places, 4)}


if __name__ == "__main__":
    main()
