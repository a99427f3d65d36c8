"""Throughput of several answers at once, compared with one after the other.

    python benchmarks/several.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl --json out.json

The same answers are generated 1, 2, 4 and 8 at a time, without drafts, with n-grams and with each
draft model, in turns (every setting once, then every setting again). A ratio compares the tokens
per second with those of one answer at a time without drafts in the same turn; printed is the
geometric mean over the turns. The time of the prefill is reported separately. All texts must be the
same as with one answer at a time without drafts.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.answers import (
    drafts_of,
    mean_ratio,
    n_equal,
    opened,
    parser_of,
    prompts_of,
    write_json,
)
from specgen.llama.kernels.admission import choose_kernels
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from specgen.system.folders import cache_folder

N_AT_ONCE = (1, 2, 4, 8)


def main() -> None:
    parser = parser_of(__doc__, count=16, max_tokens=64, ctx_size=1536, drafts=True)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    choose_kernels("auto", cache_folder())
    prompts = prompts_of(arguments)
    measurements = MeasurementStore()
    runs_by_setting: dict[tuple[str, int], list[dict[str, Any]]] = {}
    texts: list[str] = []
    for turn in range(arguments.turns):
        for name, draft in drafts_of(arguments.draft).items():
            with opened(arguments.target, draft, arguments.max_tokens, measurements) as loaded:
                for n in N_AT_ONCE:
                    run = _answers(loaded, prompts, n, arguments.ctx_size)
                    texts = texts or run["texts"]
                    run["n_equal"] = n_equal(run.pop("texts"), texts)
                    runs_by_setting.setdefault((name, n), []).append(run)
                    print(f"turn {turn + 1}: {name}, {n} at once: {run}", file=sys.stderr)
    plain = [run["tokens_per_s"] for run in runs_by_setting["none", 1]]
    settings = []
    for (name, n), runs in runs_by_setting.items():
        ratio = round(mean_ratio([run["tokens_per_s"] for run in runs], plain), 2)
        print(f"{name}\t{n}\t{ratio}\t" + "\t".join(str(run["tokens_per_s"]) for run in runs))
        settings.append({"draft": name, "at_once": n, "ratio": ratio, "turns": runs})
    about = {"target": arguments.target.name, "n_prompts": len(prompts), "ways": settings}
    write_json(arguments.json, about)


def _answers(session: Session, prompts: list[str], n: int, n_ctx: int) -> dict[str, Any]:
    """Generate all answers, n at once; return the figures and the texts."""
    calibrate(session)
    with Engine(session, n_parallel=n, n_ctx=n_ctx) as engine:
        started = session.clock()
        insertions = [engine.insert(prompt) for prompt in prompts]
        for _ in engine.run():
            pass
        seconds = session.clock() - started
    done = [answer.finished for answer in insertions if answer.finished is not None]
    prompt_s = sum(finished.prompt_s for finished in done)
    n_tokens = sum(finished.n_tokens for finished in done)
    n_drafted = sum(finished.n_drafted for finished in done)
    return {
        "n_tokens": n_tokens,
        "prompt_s": round(prompt_s, 2),
        "tokens_per_s": round(n_tokens / (seconds - prompt_s), 1),
        "draft_s": round(sum(finished.draft_s for finished in done), 2),
        "target_s": round(sum(finished.target_s for finished in done) - prompt_s, 2),
        "own_s": round(sum(finished.loop_s for finished in done), 2),
        "n_drafted": n_drafted,
        "n_accepted": sum(finished.n_accepted for finished in done),
        "texts": [finished.text for finished in done],
    }


if __name__ == "__main__":
    main()
