"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

from specgen.cli import flags
from specgen.cli.one_answer import show_answer, with_grammar
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.cli.prompt import read_prompt
from specgen.errors import UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, Grammar, SamplerOptions
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options


@flags.takes_options(
    models=flags.models,
    answer=flags.answer,
    grammar=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
)
def run(
    *,
    models: ModelChoice,
    prompt_argument: flags.PromptArgument = None,
    prompt_option: flags.PromptOption = None,
    prompt_file: flags.PromptFile = None,
    chat: flags.Chat = None,
    system: flags.System = None,
    answer: GenerationOptions,
    grammar: Grammar | None,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    learn: flags.Learn = False,
    show: flags.ShowOption = "accepted",
    stats: flags.Stats = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal,
    colours show which tokens were drafted and accepted, and which the target chose itself.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    if system is not None and chat is False:
        raise UsageError("--system and --raw exclude each other: --raw uses no chat template")
    generation = with_grammar(answer, grammar, json=json)
    prompt = read_prompt(prompt_argument, prompt_option, prompt_file)

    sources = find_models(models, quiet=quiet)
    options = session_options(
        sources,
        sampling,
        drafting,
        generation,
        machine,
        learn=learn,
    )
    use_kernels(machine.kernels, quiet=quiet)
    with (
        log_shown(verbose),
        open_session(options, quiet=quiet, verbose=verbose, drafts=sources.drafts) as loaded,
    ):
        return show_answer(
            loaded,
            loaded.prompts.of_text(prompt, chat=chat, system=system),
            show=show,
            stats=stats if stats is not None else not (json or quiet),
            json=json,
            quiet=quiet,
            verbose=verbose,
        )
