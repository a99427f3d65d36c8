"""``specgen verify``: checks losslessness on the user's own pair."""

from __future__ import annotations

import json as json_module
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Option

from specgen.cli import flags
from specgen.cli.model_loading import opened
from specgen.cli.output import Output
from specgen.errors import DefectError, UsageError
from specgen.measure.prompts import TRIAL_PROMPTS, evenly_chosen, read_prompts
from specgen.options import Contexts, DraftOptions, GenerationOptions, ModelChoice, SamplerOptions
from specgen.session.files import find_models

if TYPE_CHECKING:
    from specgen.cli.process import Interrupt
    from specgen.measure.verify import GreedyResult, SampledResult, VerifyReport, Way
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: How many of the prompts are answered again, several at once.
_N_AT_ONCE_PROMPTS = 6
#: The temperature of sampled checks if none is given: llama.cpp's default.
_TEMPERATURE = 0.8
#: How many prompts are answered to find a place where samples are drawn.
_N_TRIED = 3


@flags.takes_options(
    flags.panel(
        "Checks",
        check=Option("--check", help="What to check."),
        prompts=Option(
            "--prompts",
            help='Prompts to check with: JSON Lines with "prompt" or "turns".',
            show_default="a few of our own",
        ),
        n_prompts=Option(
            "--count",
            "-N",
            min=1,
            help="How many prompts to use, spread evenly over the file; draws use 3 of them.",
        ),
        max_tokens=Option(
            "--max-tokens",
            "--predict",
            "--n-predict",
            "-n",
            min=1,
            help="Greedy: how many tokens of each answer to compare.",
        ),
        n_draws=Option(
            "--draws",
            min=100,
            max=1_000_000,
            help="Sampled: how many times to draw the next token, for each way to draft.",
        ),
        false_alarm=Option(
            "--false-alarm",
            min=1e-9,
            max=0.2,
            help="Sampled: the probability that a test fails although nothing is wrong.",
        ),
    ),
    models=flags.models,
    chat=flags.CHAT,
    answer=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
    json=Option("--json", help="Print the whole report as one JSON object."),
    output=flags.loudness,
)
def verify(
    *,
    models: ModelChoice,
    check: Literal["both", "greedy", "sampled"] = "both",
    prompts: Path | None = None,
    n_prompts: int = 16,
    max_tokens: int = 64,
    n_draws: int = 400,
    false_alarm: float = 1e-4,
    chat: bool | None = None,
    answer: GenerationOptions,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    json: bool = False,
    output: Output,
) -> int:
    """Check that drafting does not change what your model says.

    It drafts as `specgen run` does with the same options; if costs decide how much, each check is made
    again with a draft in every round. Greedy: answers with and without drafts are compared token by
    token; a difference is traced to a near-tie and rounding in batches, or is a defect. Some prompts are
    answered again, three at once. Sampled: draws of the next token are tested against the target's exact
    distribution. Exit code 0 means that no defect was found, 11 that one was, or that nothing was drafted.
    """
    from specgen.measure.goodness_of_fit import split_level
    from specgen.measure.trial import fitting_prompts
    from specgen.measure.verify import N_SEARCHED, VerifyReport, ways_to_draft
    from specgen.session.open import session_options

    if models.draft == "none":
        raise UsageError("--draft none drafts nothing, so there is nothing to verify")
    if drafting.n_max == 0:
        raise UsageError("--draft-max 0 drafts nothing, so there is nothing to verify")
    texts = list(TRIAL_PROMPTS) if prompts is None else read_prompts(prompts)
    sources = find_models(models, quiet=output.quiet)
    if sources.draft == "none":
        why = sources.drafts[0].why  # what was saved for this target
        raise UsageError(f"{why}: there is nothing to verify", hint="name a draft with --draft")
    answer = replace(answer, max_tokens=max_tokens)
    greedy_sampler = replace(sampling, temperature=0.0, xtc_probability=0.0)
    if sampling.temperature <= 0.0:
        sampling = replace(sampling, temperature=_TEMPERATURE)
    options = session_options(sources, greedy_sampler, drafting, answer, machine)
    greedy: list[GreedyResult] = []
    sampled: list[SampledResult] = []
    ways = ways_to_draft(drafting)
    with (
        opened(options, machine.kernels, output, sources.drafts) as loaded,
        output.measuring() as (progress, stop),
    ):
        chosen = evenly_chosen(enumerate(texts, 1), n_prompts)
        n_more = 1 if check == "greedy" else N_SEARCHED + 1
        fitting, skipped = fitting_prompts(loaded, chosen, chat, n_more)
        if check != "sampled":
            greedy = _greedy(loaded, fitting, ways, progress, stop)
        if check != "greedy" and not stop():
            if greedy:
                output.note(
                    f"{n_draws * len(ways)} draws of a token follow, which may take most of the time: --draws "
                    "makes them fewer, --check greedy leaves them out"
                )
            tried = dict(list(fitting.items())[:_N_TRIED])
            loaded.change_sampling(sampling)
            level = split_level(false_alarm, len(ways))
            sampled = _sampled(loaded, tried, ways, n_draws, level, progress, stop)
        report = VerifyReport(
            target=options.target.name,
            draft=loaded.draft.name if loaded.draft is not None else "none",
            verifier=drafting.verifier,
            draft_max=drafting.n_max,
            sampler=sampling,
            check=check,
            greedy=tuple(greedy),
            sampled=tuple(sampled),
            skipped=skipped,
            is_interrupted=stop(),
            kernels=loaded.target.kernels,
            unequal_rows=loaded.target.row_exception if loaded.target.has_kernels else "",
        )
    _show(report, json=json)
    if stop():
        return stop.exit_code
    if report.verdict == "defect":
        raise DefectError(
            "drafting changed the text: see the report",
            hint="please report it, with the command and the two models' names",
        )
    if report.undrafted:
        raise DefectError(
            f"nothing was drafted, so nothing was checked: {', '.join(report.undrafted)}",
            hint="use other --prompts, or options that draft more (--draft-p-min 0, --ngram-min 1)",
        )
    return 0


def _greedy(
    session: Session,
    prompts: dict[int, Prompt],
    ways: list[Way],
    progress: Progress,
    stop: Interrupt,
) -> list[GreedyResult]:
    """Check answers alone in every way to draft, and some at once in the last one, which drafts most."""
    from specgen.measure.verify import N_AT_ONCE, check_greedy, plain_texts

    numbers = list(prompts)
    progress("greedy, plain decoding", 0, 1)
    texts = plain_texts(session, list(prompts.values()), stop)
    plain = dict(zip(numbers, texts, strict=False))  # fewer if interrupted
    checks = [(way, 1, numbers) for way in ways]
    if not session.why_one_sequence:
        checks.append((ways[-1], N_AT_ONCE, evenly_chosen(numbers, _N_AT_ONCE_PROMPTS)))
    results: list[GreedyResult] = []
    for way, n_at_once, some in checks:
        found = check_greedy(
            session,
            [prompts[number] for number in some],
            [plain[number] for number in some if number in plain],
            way=way,
            n_at_once=n_at_once,
            interrupted=stop,
            progress=partial(progress, "greedy" if n_at_once == 1 else "greedy, at once"),
        )
        results += [replace(each, prompt=some[each.prompt - 1]) for each in found]
    return results


def _sampled(
    session: Session,
    prompts: dict[int, Prompt],
    ways: list[Way],
    n_draws: int,
    level: float,
    progress: Progress,
    stop: Interrupt,
) -> list[SampledResult]:
    """Draw at one place for each way to draft, in the answer to one of the prompts."""
    from specgen.measure.verify import check_sampled

    numbers, seed = list(prompts), max(0, session.options.sampler.seed)
    found = [
        check_sampled(
            session,
            list(prompts.values()),
            n_draws,
            level,
            seed=seed,
            way=way,
            interrupted=stop,
            progress=partial(progress, f"sampled, {way.name}"),
        )
        for way in ways
    ]
    return [replace(each, prompt=numbers[each.prompt - 1]) for each in found if each is not None]


def _show(report: VerifyReport, *, json: bool) -> None:
    from specgen.measure.verify import to_json_object
    from specgen.render.streams import make_console
    from specgen.render.verify_report import print_report

    if json:
        print(json_module.dumps(to_json_object(report), ensure_ascii=False))
    else:
        print_report(report, make_console(sys.stdout, os.environ))
