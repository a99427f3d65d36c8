"""``specgen verify``: checks losslessness on the user's own pair."""

from __future__ import annotations

import datetime
import json as json_module
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Option

from specgen.cli import flags
from specgen.cli.model_loading import load, log_shown, use_kernels
from specgen.cli.output import Output
from specgen.errors import DefectError, PromptError, UsageError
from specgen.measure.prompts import TRIAL_PROMPTS, evenly_chosen, read_prompts
from specgen.options import Contexts, DraftOptions, GenerationOptions, ModelChoice, SamplerOptions
from specgen.session.files import find_models

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specgen.cli.process import Interrupt
    from specgen.measure.verify import (
        GreedyResult,
        SampledResult,
        UncheckedPrompt,
        VerifyReport,
        Way,
    )
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
            help="Greedy: how many prompts to use, spread evenly over the file.",
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
    from specgen.measure.verify import VerifyReport, ways_to_draft
    from specgen.session.open import open_memory, session_options

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
    use_kernels(machine.kernels, output)
    greedy: list[GreedyResult] = []
    sampled: list[SampledResult] = []
    ways = ways_to_draft(drafting)
    with log_shown(output), output.measuring() as (progress, stop):
        with load(options, output, sources.drafts, memory=open_memory()) as loaded:
            job = _Job(loaded, texts, chat, progress, stop)
            if check != "sampled":
                greedy = job.greedy(ways, n_prompts)
            kernels, draft = (
                loaded.target.kernels,
                loaded.draft.name if loaded.draft is not None else "none",
            )
            unequal_rows = loaded.target.row_exception if loaded.target.has_kernels else ""
            options = replace(loaded.options, draft=loaded.draft_source, sampler=sampling)
        if check != "greedy" and not stop():
            if greedy:
                output.note(
                    f"{n_draws * len(ways)} draws of a token follow, which may take most of the time: --draws "
                    "makes them fewer, --check greedy leaves them out"
                )
            with load(options, output, memory=open_memory()) as loaded:
                job.loaded = loaded
                sampled = job.sampled(ways, n_draws, split_level(false_alarm, len(ways)))
        skipped = job.skipped()
    if skipped and not greedy and not sampled and not stop():
        raise PromptError(
            f"no prompt fits the context; prompt {skipped[0].prompt}: {skipped[0].reason}",
            hint="use a larger --ctx-size, or shorter prompts",
        )
    report = VerifyReport(
        target=options.target.name,
        draft=draft,
        verifier=drafting.verifier,
        draft_max=drafting.n_max,
        sampler=sampling,
        check=check,
        greedy=tuple(greedy),
        sampled=tuple(sampled),
        skipped=skipped,
        is_interrupted=stop(),
        kernels=kernels,
        unequal_rows=unequal_rows,
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


class _Job:
    """The checks of one command."""

    def __init__(
        self,
        loaded: Session,
        texts: list[str],
        chat: bool | None,
        progress: Progress,
        stop: Interrupt,
    ) -> None:
        self.loaded = loaded
        self._texts = texts
        self._chat = chat
        self._progress = progress
        self._stop = stop
        self._skipped: dict[int, str] = {}

    def greedy(self, ways: list[Way], n_prompts: int) -> list[GreedyResult]:
        """Check answers alone in every way to draft, and some at once in the last one, which drafts most."""
        from specgen.measure.verify import N_AT_ONCE, check_greedy, plain_texts

        chosen = evenly_chosen(enumerate(self._texts, 1), n_prompts)
        # With a draft in another vocabulary the prompt has its tokens too, so that this follows a change of drafts.
        prompts = {n: prompt for n, text in chosen if (prompt := self._prompt(n, text)) is not None}
        self._progress("greedy, plain decoding", 0, 1)
        plain = plain_texts(self.loaded, list(prompts.values()), self._stop)
        results: list[GreedyResult] = []
        some = evenly_chosen(range(len(prompts)), _N_AT_ONCE_PROMPTS)
        checks: list[tuple[Way, int, Sequence[int]]] = [
            (way, 1, range(len(prompts))) for way in ways
        ]
        if not self.loaded.why_one_sequence:
            checks.append((ways[-1], N_AT_ONCE, some))
        for way, n_at_once, places in checks:
            what = "greedy" if n_at_once == 1 else "greedy, at once"
            numbers = [list(prompts)[place] for place in places]
            found = check_greedy(
                self.loaded,
                [prompts[number] for number in numbers],
                [plain[place] for place in places if place < len(plain)],
                way=way,
                n_at_once=n_at_once,
                interrupted=self._stop,
                progress=lambda done, total, what=what: self._progress(what, done, total),  # type: ignore[misc]
            )
            results += [replace(each, prompt=numbers[each.prompt - 1]) for each in found]
        return results

    def sampled(self, ways: list[Way], n_draws: int, level: float) -> list[SampledResult]:
        """Draw at one place for each way to draft, in the answer to one of the first prompts that fit."""
        from specgen.measure.verify import N_SEARCHED, check_sampled

        fitting: dict[int, Prompt] = {}
        for number, text in enumerate(self._texts, 1):
            if len(fitting) == _N_TRIED:
                break
            if (prompt := self._prompt(number, text, N_SEARCHED)) is not None:
                fitting[number] = prompt
        results: list[SampledResult] = []
        for way in ways:
            what = f"sampled, {way.name}"
            result = check_sampled(
                self.loaded,
                list(fitting.values()),
                n_draws,
                level,
                seed=max(0, self.loaded.options.sampler.seed),
                way=way,
                interrupted=self._stop,
                progress=lambda done, total, what=what: self._progress(what, done, total),  # type: ignore[misc]
            )
            if result is not None:
                results.append(replace(result, prompt=list(fitting)[result.prompt - 1]))
        return results

    def skipped(self) -> tuple[UncheckedPrompt, ...]:
        from specgen.measure.verify import UncheckedPrompt

        return tuple(UncheckedPrompt(*each) for each in sorted(self._skipped.items()))

    def _prompt(self, number: int, text: str, n_more: int = 0) -> Prompt | None:
        """Return a prompt for the model; None, with a note, if it does not fit the context with `n_more`
        tokens. (A fixed date is used, so that one in a template does not matter.)"""
        now = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
        prompt = self.loaded.prompts.of_text(text, chat=self._chat, now=now)
        try:
            self.loaded.context_size(len(prompt.tokens) + n_more + 1)
        except PromptError:
            n_tokens = len(prompt.tokens)
            self._skipped[number] = (
                f"the context has no room for its {n_tokens} tokens and an answer"
            )
            return None
        return prompt


def _show(report: VerifyReport, *, json: bool) -> None:
    from specgen.measure.verify import to_json_object
    from specgen.render.select import make_console
    from specgen.render.verify_report import print_report

    if json:
        print(json_module.dumps(to_json_object(report), ensure_ascii=False))
    else:
        print_report(report, make_console(sys.stdout, os.environ))
