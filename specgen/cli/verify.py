"""``specgen verify``: checks losslessness on the user's own pair."""

from __future__ import annotations

import datetime
import json as json_module
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Option

from specgen.cli import flags
from specgen.cli.model_loading import load, log_shown, use_kernels
from specgen.cli.output import Output
from specgen.errors import DefectError, PromptError, UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, ModelChoice, SamplerOptions
from specgen.render.text import counted
from specgen.session.files import find_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specgen.cli.process import Interrupt
    from specgen.measure.proof import (
        DraftingPlan,
        GreedyResult,
        ProofCheck,
        ProofReport,
        SampledPlan,
        SampledResult,
        UncheckedPrompt,
    )
    from specgen.options import SessionOptions
    from specgen.session.files import DraftChoice
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: How many of the prompts are answered again, several at once.
_N_AT_ONCE_PROMPTS = 6
#: The temperature of sampled checks if none is given: llama.cpp's default.
_TEMPERATURE = 0.8
#: How many prompts are answered, and at how many places samples are drawn, if neither is given.
_N_PROMPTS, _N_PLACES = 16, 3
#: The deviation to find if none is given, and where fewer prompts than places are asked for.
_DEVIATION, _ROUGH_DEVIATION = 0.08, 0.15


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
            show_default="16",
        ),
        max_tokens=Option(
            "--max-tokens",
            "--predict",
            "--n-predict",
            "-n",
            min=1,
            help="Greedy: how many tokens of each answer to compare.",
        ),
        n_places=Option(
            "--places",
            min=1,
            help="Sampled: at how many places to draw for each way to draft, each in the answer to another "
            "prompt.",
            show_default="3, or as many as --count if that is less",
        ),
        depth=Option(
            "--depth", min=1, max=4, help="Sampled: how many tokens to draw and to test jointly."
        ),
        deviation=Option(
            "--deviation",
            min=0.001,
            max=0.5,
            help="Sampled: the total variation distance to find with 99 % probability; it sets the number "
            "of draws.",
            show_default="0.08, or 0.15 if --count is 1 or 2",
        ),
        n_draws=Option(
            "--draws",
            min=100,
            max=10_000_000,
            help="Sampled: how many draws to make at each place.",
            show_default="from --deviation",
        ),
        false_alarm=Option(
            "--false-alarm",
            min=1e-9,
            max=0.2,
            help="Sampled: the probability that any test fails although nothing is wrong.",
        ),
    ),
    models=flags.models,
    chat=flags.CHAT,
    answer=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
    seeded_bug=Option("--seeded-bug", hidden=True),
    json=Option("--json", help="Print the whole report as one JSON object."),
    output=flags.loudness,
)
def verify(
    *,
    models: ModelChoice,
    check: Literal["both", "greedy", "sampled"] = "both",
    prompts: Path | None = None,
    n_prompts: int | None = None,
    max_tokens: int = 64,
    n_places: int | None = None,
    depth: int = 3,
    deviation: float | None = None,
    n_draws: int | None = None,
    false_alarm: float = 1e-4,
    chat: bool | None = None,
    answer: GenerationOptions,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    seeded_bug: str | None = None,
    json: bool = False,
    output: Output,
) -> int:
    """Check that drafting does not change what your model says.

    It drafts as `specgen run` does with the same options; if costs decide how much, each check is made
    again with a draft in every round. Greedy: answers with and without drafts are compared token by
    token; a difference is traced to a near-tie and rounding in batches, or is a defect. Some prompts are
    answered again, three at once. Sampled: samples are tested against the target's exact distribution.
    Exit code 0 means that no defect was found, 11 that one was, or that nothing was drafted.
    """
    from specgen.measure.proof import (
        BUGS,
        OWN_PROMPTS,
        SampledPlan,
        read_prompts,
        split_level,
        ways_to_draft,
    )

    if seeded_bug is not None and seeded_bug not in BUGS:
        raise UsageError(f"--seeded-bug {seeded_bug}: one of {', '.join(BUGS)}")
    if models.draft == "none":
        raise UsageError("--draft none drafts nothing, so there is nothing to verify")
    if drafting.n_max == 0:
        raise UsageError("--draft-max 0 drafts nothing, so there is nothing to verify")
    texts = list(OWN_PROMPTS) if prompts is None else read_prompts(prompts)
    ways = ways_to_draft(drafting)
    n_few = min(_N_PLACES, n_prompts or _N_PLACES)  # whoever wants little does not wait long
    n_places = n_places or n_few
    deviation = deviation or (_ROUGH_DEVIATION if n_few < _N_PLACES else _DEVIATION)
    plan = SampledPlan(
        depth=depth,
        deviation=deviation,
        level=split_level(false_alarm, depth * n_places * len(ways)),
        n_draws=n_draws,
    )
    from specgen.session.open import open_memory, session_options

    sources = find_models(models, quiet=output.quiet)
    if sources.draft == "none":
        why = sources.drafts[0].why  # what was saved for this target
        raise UsageError(f"{why}: there is nothing to verify", hint="name a draft with --draft")
    answer = replace(answer, max_tokens=max_tokens)
    options = session_options(sources, sampling, drafting, answer, machine)
    use_kernels(machine.kernels, output)
    with log_shown(output), output.measuring() as (progress, stop):
        opened = partial(load, output=output, memory=open_memory())
        job = _Job(options, ways, (sources.drafts, opened), texts, chat, progress, stop, seeded_bug)
        greedy = job.greedy(n_prompts or _N_PROMPTS) if check != "sampled" else ()
        if check == "both" and greedy and not stop():
            output.note(
                f"samples at {counted(n_places * len(ways), 'place')} follow, hundreds or thousands of draws "
                "at each, which takes most of the time: --places and --draws make it less, --check greedy "
                "leaves it out"
            )
        sampled = job.sampled(plan, n_places) if check != "greedy" else ()
    report = job.report(check, greedy, sampled)
    _show(report, json=json)
    if stop():
        return stop.exit_code
    if report.is_defect:
        raise DefectError(
            "drafting changed the text: see the report",
            hint=None
            if report.seeded_bug
            else "please report it, with the command and the two models' names",
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
        options: SessionOptions,
        ways: list[DraftingPlan],
        models: tuple[Sequence[DraftChoice], Callable[..., Session]],
        prompts: list[str],
        chat: bool | None,
        progress: Progress,
        stop: Interrupt,
        seeded_bug: str | None,
    ) -> None:
        from specgen.measure.proof import BUGS

        self._options = options
        self._ways = ways
        self._drafts, self._opened = models
        self._prompts = prompts
        self._chat = chat
        self._progress = progress
        self._stop = stop
        self._bug = BUGS[seeded_bug] if seeded_bug is not None else None
        sampler = options.sampler
        if sampler.temperature <= 0.0:
            sampler = replace(sampler, temperature=_TEMPERATURE)
        # Without a given seed the sampler keeps none: that decides how drafts are judged.
        self._sampler = sampler
        self._seed = max(0, sampler.seed)
        #: By number.
        self._skipped: dict[int, UncheckedPrompt] = {}
        self._unequal_rows = ""
        self._kernels = ""

    def greedy(self, n_prompts: int) -> tuple[GreedyResult, ...]:
        from specgen.measure.proof import N_AT_ONCE, PlainAnswers, check_greedy, evenly_chosen

        sampler = replace(self._options.sampler, temperature=0.0, xtc_probability=0.0)
        results: list[GreedyResult] = []
        with self._open(sampler) as loaded:
            chosen = evenly_chosen(enumerate(self._prompts, 1), n_prompts)
            answers = PlainAnswers()
            fitting: dict[int, Prompt] = {}
            for way in self._ways:
                loaded.change_drafting(way.drafting)
                prompts = {n: self._prompt(loaded, n, text, 0) for n, text in chosen}
                fitting = {n: prompt for n, prompt in prompts.items() if prompt is not None}
                checked = check_greedy(
                    loaded,
                    list(fitting.values()),
                    interrupted=self._stop,
                    bug=self._bug,
                    answers=answers,
                    way=way,
                )
                n_all = len(fitting) * len(self._ways)
                self._progress("greedy", len(results), n_all)
                for number, result in zip(fitting, checked, strict=False):
                    results.append(replace(result, prompt=number))
                    self._progress("greedy", len(results), n_all)
            # The last way drafts most, and is loaded.
            some = evenly_chosen(fitting.items(), _N_AT_ONCE_PROMPTS)
            checked = check_greedy(
                loaded,
                [prompt for _, prompt in some],
                n_at_once=N_AT_ONCE,
                interrupted=self._stop,
                bug=self._bug,
                answers=answers,
                way=self._ways[-1],
                progress=lambda done, total: self._progress("greedy, at once", done, total),
            )
            results += [replace(each, prompt=some[each.prompt - 1][0]) for each in checked]
            self._name_unequal_rows(loaded, [result.batches_move for result in results])
        return tuple(results)

    def sampled(self, plan: SampledPlan, n_places: int) -> tuple[SampledResult, ...]:
        results: list[SampledResult] = []
        with self._open(self._sampler) as loaded:
            for n_ways, way in enumerate(self._ways):
                results += self._sampled(loaded, way, plan, n_places, n_places * n_ways)
            self._name_unequal_rows(loaded, [result.rows.batches_move for result in results])
        return tuple(results)

    def _sampled(
        self, loaded: Session, way: DraftingPlan, plan: SampledPlan, n_places: int, n_before: int
    ) -> list[SampledResult]:
        """Sample at `n_places` positions with one way to draft; `n_before` positions came before."""
        from specgen.measure.proof import check_sampled, room

        loaded.change_drafting(way.drafting)
        results: list[SampledResult] = []
        n_all = n_places * len(self._ways)
        for number, text in enumerate(self._prompts, 1):
            if len(results) == n_places or self._stop():
                break
            prompt = self._prompt(loaded, number, text, room(plan))
            if prompt is None:
                continue
            what = f"sampled, place {n_before + len(results) + 1} of {n_all}"
            result = check_sampled(
                loaded,
                prompt,
                plan,
                seed=self._seed + number,
                number=number,
                progress=lambda done, total, what=what: self._progress(what, done, total),  # type: ignore[misc]
                interrupted=self._stop,
                bug=self._bug,
                way=way,
            )
            if result is not None:
                results.append(result)
        return results

    def _name_unequal_rows(self, loaded: Session, moved_by: list[float]) -> None:
        """Learn why rows depend on their batch, if they do and it is not known yet."""
        from specgen.measure.proof.rows import unequal_rows

        prompt = loaded.prompts.of_text(self._prompts[0], chat=self._chat).tokens
        self._unequal_rows = self._unequal_rows or unequal_rows(
            loaded, prompt, are_moved=any(moved_by)
        )

    def report(
        self,
        check: ProofCheck,
        greedy: tuple[GreedyResult, ...],
        sampled: tuple[SampledResult, ...],
    ) -> ProofReport:
        """Return the results. Raise `PromptError` if no prompt could be checked."""
        from specgen.measure.proof import ProofReport

        skipped = tuple(self._skipped[number] for number in sorted(self._skipped))
        if skipped and not greedy and not sampled and not self._stop():
            raise PromptError(
                f"no prompt fits the context; prompt {skipped[0].prompt}: {skipped[0].reason}",
                hint="use a larger --ctx-size, or shorter prompts",
            )
        draft = self._options.draft
        return ProofReport(
            target=self._options.target.name,
            draft=draft.name if isinstance(draft, Path) else draft,
            verifier=self._options.drafting.verifier,
            draft_max=self._options.drafting.n_max,
            sampler=replace(self._sampler, seed=self._seed),
            seeded_bug=self._bug.name if self._bug is not None else None,
            check=check,
            greedy=greedy,
            sampled=sampled,
            skipped=skipped,
            is_interrupted=self._stop(),
            unequal_rows=self._unequal_rows,
            kernels=self._kernels,
        )

    def _open(self, sampler: SamplerOptions) -> Session:
        loaded = self._opened(replace(self._options, sampler=sampler), drafts=self._drafts)
        self._options = replace(self._options, draft=loaded.draft_source)
        self._drafts = ()  # it is loaded again, without a choice
        self._kernels = loaded.target.kernels
        return loaded

    def _prompt(self, loaded: Session, number: int, text: str, n_more: int) -> Prompt | None:
        """Return a prompt for the model; None, with a note, if it does not fit the context with `n_more`
        tokens. (A fixed date is used, so that one in a template does not matter.)"""
        from specgen.measure.proof import UncheckedPrompt

        now = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
        prompt = loaded.prompts.of_text(text, chat=self._chat, now=now)
        try:
            loaded.context_size(len(prompt.tokens) + n_more + 1)
        except PromptError:
            reason = f"the context has no room for its {len(prompt.tokens)} tokens and an answer"
            self._skipped[number] = UncheckedPrompt(number, reason)
            return None
        return prompt


def _show(report: ProofReport, *, json: bool) -> None:
    from specgen.measure.proof import to_json_object
    from specgen.render.select import make_console
    from specgen.render.verify_report import print_report

    if json:
        print(json_module.dumps(to_json_object(report), ensure_ascii=False))
    else:
        print_report(report, make_console(sys.stdout, os.environ))
