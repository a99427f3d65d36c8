"""``specgen race``: one prompt, answered without and with drafts, and both answers side by side."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.flags.trials import check_choice, check_drafts
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Interrupt, Output, check_file_option, console_on
from specgen.errors import UsageError

if TYPE_CHECKING:
    from specgen.measure.race import Race

#: The limit of answers without -n: a replay should not take minutes.
_MAX_TOKENS = 256
#: No prefix of a prompt and no answer is kept, since the answer with drafts comes second.
_setup = (
    flags.setup.without(
        "--learn",
        "--logprobs",
        "--lookup-store",
        "--phrase-store",
        "--prefix-store",
        "--prefix-store-size",
        "--prompt-cache",
    )
    .with_default("--prefix-store", "off")
    .with_default("--phrase-store", False)
    .with_default("--max-tokens", _MAX_TOKENS)
)


@flags.takes_options
def race(
    *,
    svg_file: Path | None = option(
        None,
        "--svg",
        "Write an animated picture of the replay.",
        metavar="FILE",
    ),
    html_file: Path | None = option(
        None,
        "--html",
        "Write an HTML page that replays both answers, round by round.",
        metavar="FILE",
    ),
    question: flags.Question = flags.question,
    template: flags.Template = flags.template,
    setup: Setup = _setup,
    as_json: bool = flags.JSON_REPORT,
    output: Output = flags.loudness,
) -> int:
    """Race drafting against plain decoding, and replay both answers side by side.

    The prompt is answered twice: first without drafts, then with them. Each answer has its own
    prefill and empty caches, and both are warmed up on another prompt. On a terminal, the answers
    are then replayed side by side, as fast as they were generated; Ctrl-C skips the replay. The
    last line tells how many times as fast drafting was, and whether the texts are identical. If
    they are, the times of the whole answers are compared, otherwise the tokens per second after
    the first token.

    In a pipe, it prints a tab-separated line for each answer, under column names.
    """
    from specgen.measure.race import CONDITIONS, run_race

    check_file_option("--svg", svg_file)
    check_file_option("--html", html_file)
    check_drafts(setup.drafting, "race", setup.models.draft)
    text = question.read(output.note)
    wanted = setup.wanted_session(quiet=output.quiet)
    check_choice(wanted.drafts[0], "race")
    with opened(wanted, setup.machine.kernels, output) as session:
        if session.draft is None:
            hint = "name a draft with --draft"
            raise UsageError("no draft is expected to pay off, so there is nothing to race", hint)
        asked = session.prompts.of_text(text, chat=template.chat, system=template.system)
        for note in (asked.notice, CONDITIONS):
            if note:
                output.note(note)
        with output.measuring() as (progress, stop):
            result = run_race(session, asked, progress=progress, interrupted=stop)

    try:
        if not result.is_interrupted:
            _write_files(result, svg_file, html_file)
    finally:  # the result is shown even if a file cannot be written
        _show(result, output, as_json=as_json)
    if result.is_interrupted:
        output.note("interrupted: not everything was measured")
        return stop.exit_code
    return 0


def _show(race: Race, output: Output, *, as_json: bool) -> None:
    """Print a race as JSON, as a replay or as lines; and the notes about it."""
    from specgen.render.tables import notes_on_figures, race_lines

    if as_json:
        print(json.dumps(race.to_json_object(), ensure_ascii=False))
    elif sys.stdout.isatty():
        _replay(race)
    else:
        for line in race_lines(race):
            print(line)
        if not race.is_interrupted:
            output.note(race.verdict)
    shares = [answer.finished.others_share for answer in race.answers]
    known_shares = [share for share in shares if share is not None]
    notes = [notice for answer in race.answers for notice in answer.notices]
    notes += notes_on_figures(max(known_shares, default=None))
    if race.difference:
        notes.append(race.difference)
    for note in dict.fromkeys(notes):
        output.note(note)


def _replay(race: Race) -> None:
    """Replay a race on a terminal, and print the result below it.

    An interrupted race, or any race on a terminal without escape codes, has a line for each answer
    in place of the replay.
    """
    from specgen.render.side_by_side import replay

    console = console_on(sys.stdout)
    if race.is_interrupted or console.is_dumb_terminal or console.legacy_windows:
        for answer in race.answers:
            print(f"{answer.title}: {answer.length}")
    else:
        sys.stdout.flush()  # so that earlier output comes first
        with Interrupt() as skipped:
            replay(race, console, clock=time.monotonic, sleep=time.sleep, interrupted=skipped)
    if not race.is_interrupted:
        print(race.verdict)


def _write_files(
    race: Race,
    svg_file: Path | None,
    html_file: Path | None,
) -> None:
    """Write the picture and the page that the user asked for."""
    from specgen.events import to_json_object
    from specgen.measure.race import CONDITIONS
    from specgen.render.picture import race_picture
    from specgen.render.streams import REPLAY, write_page
    from specgen.system.files import write_errors, write_output

    if svg_file is not None:
        with write_errors(svg_file):
            write_output(svg_file, race_picture(race).encode())
    if html_file is not None:
        answers = [[to_json_object(event) for event in answer.events] for answer in race.answers]
        page = {"answers": answers, "verdict": race.verdict, "conditions": CONDITIONS}
        write_page(html_file, REPLAY, page)
