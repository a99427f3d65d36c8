"""``specgen draft``: find, make or train drafts for a target."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer
from typer import Option

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.draft_find import find
from specgen.cli.draft_make import data, make
from specgen.cli.model_loading import use_kernels
from specgen.cli.output import Output
from specgen.errors import OutputError, UsageError
from specgen.models.files import cache_folder, data_folder, identity_of, learning_folder, size_of
from specgen.options import KernelOptions, ModelChoice
from specgen.session.files import find_models, find_target
from specgen.system.progress import human_bytes

app = typer.Typer(
    name="draft", help="Find, make or train the best draft for a target.", no_args_is_help=True
)
for command in (find, make, data):
    app.command(cls=Command)(command)


@app.command(cls=Command)
@flags.takes_options(
    target=flags.target_option(
        help="The target whose answers were kept: a GGUF file, or a name.",
    ),
    draft=flags.draft_model_option(
        help="The draft model that learns.",
        show_default="the one that `specgen run` takes for this target",
    ),
    minutes=Option("--minutes", min=0.1, help="How long it may train at most."),
    as_json=flags.JSON_REPORT,
    output=flags.loudness.without("verbose"),
)
def learn(
    *,
    target: str,
    draft: str | None = None,
    minutes: float = 10.0,
    as_json: bool = False,
    output: Output,
) -> int:
    """Let a draft model learn from the answers that --learn kept.

    The latest answers are held back. The new weights are used from then on, where --learn is given, if the
    draft agrees with the target more often in them; otherwise they are dropped. `specgen chat` and `specgen
    serve` do this by themselves, between answers.
    """
    from specgen.llama.kernels.admission import wanted_in
    from specgen.train.online_learning import learn as learn_from
    from specgen.train.training_loop import Budget

    target_path = find_target(target, quiet=output.quiet)
    draft_path = _draft_model(target, draft, output)
    folder = learning_folder(data_folder(), identity_of(target_path))
    use_kernels(KernelOptions(wanted_in(os.environ)), output)
    with output.measuring() as (progress, stop):
        shown = partial(progress, f"{draft_path.name} learns")
        budget = Budget(time.monotonic, time.monotonic() + 60.0 * minutes, stop, shown)
        found = learn_from(folder, target_path, draft_path, budget)
    if found is None:
        output.note("interrupted; everything is as it was")
        return stop.exit_code
    print(json.dumps(asdict(found)) if as_json else f"{draft_path.name} {found.text}")
    return 0


@app.command(cls=Command)
@flags.takes_options(
    target=flags.target_option(help="The target whose answers are forgotten.", show_default="all"),
    output=flags.loudness.without("verbose"),
)
def forget(*, target: str | None = None, output: Output) -> int:
    """Delete the answers that --learn and --lookup-store kept, and the weights learnt from them."""
    from specgen.drafters.lookup_texts import count_texts
    from specgen.session.kept_answers import read_answers

    learning, texts = data_folder() / "learning", cache_folder() / "texts"
    if target is None:
        folders, stores = (
            [path for path in parent.glob("*") if path.is_dir()] for parent in (learning, texts)
        )
    else:
        path = find_target(target, quiet=output.quiet)
        folders, stores = [learning_folder(data_folder(), identity_of(path))], [_store(path)]
    n_answers = sum(len(read_answers(folder)) for folder in folders)
    n_learnt = sum(len(list(folder.glob("*.gguf"))) for folder in folders)
    n_texts = sum(map(count_texts, stores))
    n_bytes = sum(size_of(path) for folder in (*folders, *stores) for path in folder.glob("*"))
    try:
        for folder in (*folders, *stores):
            if folder.exists():
                shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"{error.filename}: cannot be deleted: {error.strerror}") from error
    print(
        f"deleted: kept answers: {n_answers}; weights learnt from them: {n_learnt}; lookup texts: {n_texts}; "
        f"{human_bytes(n_bytes)} in all"
    )
    return 0


def _draft_model(target: str, draft: str | None, output: Output) -> Path:
    """Return the model that learns. Raise `UsageError` if none is known."""
    from specgen.drafters.kinds import ANY_FILE, find_kind

    sources = find_models(ModelChoice(target, draft, None), quiet=output.quiet)
    for choice in sources.drafts:
        path = choice.draft
        kind = find_kind(path) if isinstance(path, Path) else None
        if isinstance(path, Path) and kind is not None and kind.name == ANY_FILE:
            return path
    raise UsageError(f"no model drafts for {target}", hint="name one that is to learn with --draft")


def _store(target: Path) -> Path:
    """Return the folder of lookup texts that were kept in a target's tokens."""
    from specgen.drafters.lookup_texts import EarlierTexts
    from specgen.llama import LlamaModel

    with contextlib.closing(LlamaModel(target, vocabulary_only=True)) as model:
        return EarlierTexts(cache_folder() / "texts", model.vocabulary.digest()).folder
