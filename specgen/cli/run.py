"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

from pathlib import Path

from typer import Argument, Option

from specgen.cli import flags
from specgen.cli.inputs import read_prompt
from specgen.cli.model_loading import opened
from specgen.cli.output import Output, show_answer
from specgen.options import Contexts, DraftOptions, GenerationOptions, SamplerOptions
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options


@flags.takes_options(
    flags.panel(
        "Prompt",
        option=Option(
            "--prompt", "-p", metavar="TEXT", help="The prompt, as an option as in llama.cpp."
        ),
        file=Option(
            "--file", "-f", help="Read the prompt from a file; a newline at its end is dropped."
        ),
    ),
    models=flags.models,
    argument=Argument(
        metavar="PROMPT", help="The prompt; - reads it from standard input.", show_default=False
    ),
    template=flags.template,
    answer=flags.answer,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
    learn=flags.LEARN,
    output=flags.output,
)
def run(
    *,
    models: ModelChoice,
    argument: str | None = None,
    option: str | None = None,
    file: Path | None = None,
    template: flags.Template,
    answer: GenerationOptions,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    learn: bool = False,
    output: Output,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal,
    colours show which tokens were drafted and accepted, and which the target chose itself.
    """
    output.check(answer)
    text = read_prompt(argument, option, file)
    sources = find_models(models, quiet=output.quiet)
    options = session_options(sources, sampling, drafting, answer, machine, learn=learn)
    with opened(options, machine.kernels, output, sources.drafts) as loaded:
        prompt = loaded.prompts.of_text(text, chat=template.chat, system=template.system)
        return show_answer(loaded, prompt, output)
