"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Output, show_answer

if TYPE_CHECKING:
    from specgen.session.session import Session


@flags.takes_options
def run(
    *,
    question: flags.Question = flags.question,
    template: flags.Template = flags.template,
    setup: Setup = flags.setup,
    output: Output = flags.output,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal, colours
    show which tokens were drafted and accepted.
    """
    setup = replace(setup, answer=output.with_logprobs(setup.answer))
    text = question.read(output.note)
    if template.chat is not False:
        from specgen.session.prompts.thoughts import showing_thoughts

        setup = replace(setup, answer=showing_thoughts(setup.answer))
        output = replace(output, thinks=True)
    wanted = setup.wanted_session(quiet=output.quiet)

    def check(session: Session) -> None:
        """Refuse a model with an invalid chat template, unless the prompt is used as it is."""
        from specgen.session.prompts.chat import check_template

        if template.chat is not False:
            check_template(session.target)

    with opened(wanted, setup.machine.kernels, output, check) as session:
        asked = session.prompts.of_text(text, chat=template.chat, system=template.system)
        if asked.notice:
            output.note(asked.notice)
        code, _ = show_answer(session, asked, output)
    return code
