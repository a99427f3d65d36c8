"""``specgen verify``: checks on the user's own models that drafting is lossless."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.flags.trials import TRIALS, Trials, check_choice, check_drafts
from specgen.cli.model_loading import opened
from specgen.cli.output import Output, console_on
from specgen.errors import DefectError
from specgen.options import Contexts, DraftOptions, GenerationOptions, ModelChoice, SamplerOptions
from specgen.session.choose_models import find_models

if TYPE_CHECKING:
    from specgen.measure.exactness.report import VerifyReport

#: The temperature of sampled checks if none above 0 is given: llama.cpp's default.
_DEFAULT_TEMPERATURE = 0.8


@flags.takes_options
def verify(
    *,
    check: Literal["both", "greedy", "sampled"] = option(
        "both",
        "--check",
        "What to check.",
        panel="Checks",
    ),
    n_samples: int = option(
        400,
        "--n-samples",
        "How many times to sample a token for the sampled check, with each way to draft. More "
        "samples show smaller deviations.",
        min=100,
        max=1_000_000,
        panel="Checks",
    ),
    trials: Trials = TRIALS.with_default("--count", 16),
    models: ModelChoice = flags.models,
    chat: bool | None = flags.chat_option(),
    answer: GenerationOptions = flags.constraint,
    sampling: SamplerOptions = flags.sampling,
    drafting: DraftOptions = flags.drafting,
    machine: Contexts = flags.machine,
    as_json: bool = flags.JSON_REPORT,
    output: Output = flags.loudness,
) -> int:
    """Check that drafting does not change your model's output.

    It drafts as `specgen run` does, and again with a draft in every round. Greedy: answers with and
    without drafts are compared, some of them generated three at once. If they differ, it finds out
    whether that is a defect, or only a near-tie that rounding in batches decided differently.
    Sampled: samples of the next token are tested against the exact distribution of the target. Exit
    code 0 means that no defect was found; 11 that one was, or that nothing was drafted.
    """
    from specgen.measure.draft_trial import fitting_prompts
    from specgen.measure.exactness.verification import run_checks
    from specgen.measure.exactness.visible_places import N_SEARCHED
    from specgen.measure.exactness.ways_to_draft import ways_to_draft
    from specgen.session.open import WantedSession

    check_drafts(drafting, "verify", models.draft)
    texts = [(prompt.number, prompt.text) for prompt in trials.chosen()]
    sources = find_models(models, quiet=output.quiet)
    check_choice(sources.drafts[0], "verify")
    if sampling.temperature <= 0.0:
        sampling = replace(sampling, temperature=_DEFAULT_TEMPERATURE)
    ways = ways_to_draft(drafting)

    # The session is greedy. For the sampled check, `run_checks` gets the sampling options.
    greedy = replace(
        sampling,
        temperature=0.0,
        dynatemp_range=0.0,
        xtc_probability=0.0,
        samplers=(*sampling.samplers, "temperature"),  # it may be missing
    )
    wanted = WantedSession.of(
        sources,
        sampling=greedy,
        drafting=drafting,
        generation=replace(answer, max_tokens=trials.max_tokens),
        contexts=machine,
    )
    with (
        opened(wanted, machine.kernels, output) as session,
        output.measuring("run") as (progress, stop),
    ):
        # A prompt fits if the context also has room for these tokens after it.
        n_extra_tokens = 1
        if check != "greedy":
            n_extra_tokens += N_SEARCHED
        prompts, skipped = fitting_prompts(session, texts, chat, n_extra_tokens)
        if check == "both":
            output.note(
                f"the sampling test ({n_samples * len(ways)} samples) runs last and takes longest: "
                "--n-samples makes it shorter, --check greedy leaves it out"
            )
        report = run_checks(
            session,
            prompts,
            ways,
            check=check,
            sampling=sampling,
            n_samples=n_samples,
            progress=progress,
            interrupted=stop,
        )
    _print_report(replace(report, skipped=skipped), as_json=as_json)
    if stop():
        return stop.exit_code
    _raise_defect(report)
    return 0


def _print_report(report: VerifyReport, *, as_json: bool) -> None:
    """Print a report for people, or as JSON."""
    if as_json:
        print(json.dumps(report.to_json_object(), ensure_ascii=False))
        return
    from specgen.render.verify_report import print_report

    print_report(report, console_on(sys.stdout))


def _raise_defect(report: VerifyReport) -> None:
    """Raise an error, which gives the exit code, unless the verdict of a report is good.

    Raises:
        DefectError: If a check found a defect, or had nothing to check.
    """
    if report.verdict == "defect":
        hint = "please report it, with the command and the two models' names"
        raise DefectError("drafting changed the text: see the report", hint)
    if report.undrafted:
        what = f"nothing was drafted, so nothing was checked: {', '.join(report.undrafted)}"
        hint = "use other --prompts, or options that draft more (--draft-p-min 0, --ngram-min 1)"
        raise DefectError(what, hint)
