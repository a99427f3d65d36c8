"""The options that name models: files, names of the registry, and repositories of the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from typer import Option

from specgen.cli.flags.groups import Group, Table, group, panel, utf8
from specgen.errors import UsageError
from specgen.options import ModelChoice, staged

HUB = panel(
    "Models",
    hf_repo=Option(
        "--hf-repo",
        "-hf",
        "-hfr",
        metavar="USER/REPO[:QUANT]",
        help="The target, from the Hugging Face hub, as `-m hf:USER/REPO:QUANT`. Without QUANT: Q4_K_M, else "
        "Q8_0, else the repository's first model.",
        show_default=False,
    ),
    hf_file=Option(
        "--hf-file",
        "-hff",
        metavar="FILE",
        help="With --hf-repo: the file of the repository, in place of QUANT.",
        show_default=False,
    ),
    hf_token=Option(
        "--hf-token",
        "-hft",
        metavar="TOKEN",
        parser=utf8,
        envvar="HF_TOKEN",
        help="The token for gated and private repositories; other users can see options, but not the variable.",
        show_default="the one that `hf auth login` keeps",
    ),
)
HUB_DRAFT = panel(
    "Models",
    hf_repo_draft=Option(
        "--hf-repo-draft",
        "-hfd",
        "-hfrd",
        metavar="USER/REPO[:QUANT]",
        help="The draft, from the hub, as `--draft hf:USER/REPO:QUANT`.",
        show_default=False,
    ),
)


def model_names(incomplete: str) -> list[str]:
    """Return the models whose names begin so."""
    from specgen.models.registry import load_registry

    return [name for name in load_registry().models if name.startswith(incomplete)]


def pair_names(incomplete: str) -> list[str]:
    """Return the pairs whose names begin so."""
    from specgen.models.registry import load_registry

    return [name for name in load_registry().pairs if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[str]:
    """Return what drafts and begins so."""
    kinds = [name for name in ("mtp", "ngram", "heads", "none") if name.startswith(incomplete)]
    return kinds + model_names(incomplete)


def target_option(**settings: Any) -> Any:
    """Return the option that names a target."""
    usual: dict[str, Any] = {
        "help": "The target: a GGUF file, or a name from `specgen models list`.",
        "autocompletion": model_names,
    }
    return Option("--target", "--model", "-m", metavar="FILE|NAME", **(usual | settings))


def target(*, required: bool = True, **settings: Any) -> Group:
    """Return the options that name a target, one of which must be given if it is `required`."""
    settings = {"show_default": "required" if required else False} | settings
    return named(target_option(**settings), required=required)


def draft_model(**settings: Any) -> Group:
    """Return the options that name a small model."""
    option = Option("--draft", "--model-draft", "-md", metavar="FILE|NAME", **settings)
    return named(option, HUB_DRAFT)


_MODELS = panel(
    "Models",
    target=target_option(show_default="the default pair's"),
    draft=Option(
        "--draft",
        "--model-draft",
        "-md",
        metavar="FILE|NAME|mtp|ngram|none",
        autocompletion=draft_names,
        help="What drafts: a file or a name, `mtp` (the target's own layers), `ngram` (repetitions of the text "
        "so far), `heads` (made by `specgen draft make`), or `none`. A second --draft drafts for the first.",
        show_default="the pair's; with -m alone what `specgen draft find` saved, MTP layers, a known partner on "
        "this disk, or ngram",
    ),
    pair=Option(
        "--pair",
        metavar="NAME",
        autocompletion=pair_names,
        help="A target and its draft, by a name from `specgen models list`.",
        show_default="the default pair, if no target is given",
    ),
)


@group(ModelChoice, _MODELS, HUB, HUB_DRAFT)
def models(
    *,
    target: str | None = None,
    draft: list[str] | None = None,
    pair: str | None = None,
    hf_repo: str | None = None,
    hf_repo_draft: str | None = None,
    hf_file: str | None = None,
    hf_token: str | None = None,
) -> ModelChoice:
    """Return the models as the user named them. Raise `UsageError`."""
    target = _one_name(target, hub_names(hf_repo, hf_file, hf_token))
    return staged(target, [*(draft or ()), *hub_names(hf_repo_draft)], pair)


def named(option: Any, hub: Table = HUB, *, required: bool = False) -> Group:
    """Return the options that name one model: `option`, or those of `hub`."""

    def make(
        *,
        name: str | None = None,
        hf_repo: str | None = None,
        hf_repo_draft: str | None = None,
        hf_file: str | None = None,
        hf_token: str | None = None,
    ) -> str | None:
        found = _one_name(name, hub_names(hf_repo or hf_repo_draft, hf_file, hf_token))
        if found is None and required:
            raise UsageError("no target is given", "name one with -m FILE, or -hf USER/REPO")
        return found

    return group(ModelChoice, {"name": option}, hub)(make)


def hub_names(
    repos: str | Sequence[str] | None, file: str | None = None, token: str | None = None
) -> list[str]:
    """Return the names of models on the hub, as --model takes them. The token is used from now on. Raise
    `UsageError`."""
    from specgen.models.hub_reference import parse_reference

    if token:
        os.environ["HF_TOKEN"] = token
    repos = [repos] if isinstance(repos, str) else repos or ()
    references = [parse_reference(each) for each in repos]
    if file is not None:
        if len(references) != 1:
            raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
        references = [parse_reference(f"{references[0].repo}/{file}")]
    return [str(each) for each in references]


def _one_name(name: str | None, hub: Sequence[str]) -> str | None:
    if name is not None and hub:
        raise UsageError(
            f"{name} and -hf {hub[0].removeprefix('hf:')} exclude each other", "use one of them"
        )
    return hub[0] if hub else name
