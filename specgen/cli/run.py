"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from typer import Argument, Option

from specgen.cli import flags
from specgen.cli.inputs import read_prompt
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output, show_answer


@flags.takes_options(
    flags.panel(
        "Prompt",
        option=Option(
            "--prompt", "-p", metavar="TEXT", help="The prompt, as an option as in llama.cpp."
        ),
        files=Option(
            "--file",
            "-f",
            help="Read the prompt from a file, or what stands before it; may be repeated. "
            "A newline at its end is dropped.",
        ),
    ),
    setup=flags.setup,
    argument=Argument(
        metavar="PROMPT",
        help="The prompt, behind what the files and standard input have; - is standard input.",
        show_default=False,
    ),
    template=flags.template,
    output=flags.output,
)
def run(
    *,
    argument: str | None = None,
    option: str | None = None,
    files: list[Path] | None = None,
    template: flags.Template,
    setup: Setup,
    output: Output,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal, colours show which
    tokens were drafted and accepted.
    """
    setup = replace(setup, answer=output.needs(setup.answer))
    text = read_prompt(argument, option, files or (), output.note)
    if template.chat is not False:
        from specgen.session.prompts.thoughts import showing_thoughts

        setup = replace(setup, answer=showing_thoughts(setup.answer))
        output = replace(output, thinks=True)
    with setup.opened(output) as loaded:
        prompt = loaded.prompts.of_text(text, chat=template.chat, system=template.system)
        return show_answer(loaded, prompt, output)[0]
