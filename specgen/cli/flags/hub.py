"""The options that name models on the Hugging Face hub, in llama.cpp's spellings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer import Option

from specgen.cli.flags.groups import Group, Table, group, panel, utf8
from specgen.errors import UsageError
from specgen.models import parse_reference

HUB = panel(
    "Models",
    hf_repo=Option(
        "--hf-repo",
        "-hf",
        "-hfr",
        metavar="USER/REPO[:QUANT]",
        help="The target, from the Hugging Face hub; `-m hf:USER/REPO:QUANT` is the same. Without QUANT it is "
        "Q4_K_M, else Q8_0, else the first model of the repository. Fetched on first use.",
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
        help="The token for gated and private repositories. Other users of the machine can see options: "
        "the variable is safer.",
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
        help="The draft, from the Hugging Face hub; `--draft hf:USER/REPO:QUANT` is the same.",
        show_default=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Named:
    """A model by its name, or by its repository on the hub."""

    name: str | None = None
    hf_repo: str | None = None
    hf_repo_draft: str | None = None
    hf_file: str | None = None
    hf_token: str | None = None


def named(option: Any, hub: Table = HUB, *, required: bool = False) -> Group:
    """Return the options that name one model: `option`, or those of `hub`."""

    def make(**given: Any) -> str | None:
        model = Named(**given)
        repo = model.hf_repo or model.hf_repo_draft
        found = one_name(model.name, hub_names(repo, model.hf_file, model.hf_token))
        if found is None and required:
            raise UsageError("no target is given", "name one with -m FILE, or -hf USER/REPO")
        return found

    return group(Named, {"name": option}, hub)(make)


def hub_names(
    repos: str | Sequence[str] | None, file: str | None = None, token: str | None = None
) -> list[str]:
    """Return the names of models on the hub, as --model takes them. The token is used from now on. Raise
    `UsageError`."""
    if token:
        os.environ["HF_TOKEN"] = token
    repos = [repos] if isinstance(repos, str) else repos or ()
    references = [parse_reference(each) for each in repos]
    if file is not None:
        if len(references) != 1:
            raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
        references = [parse_reference(f"{references[0].repo}/{file}")]
    return [str(each) for each in references]


def one_name(name: str | None, hub: Sequence[str]) -> str | None:
    """Return the name of a model. Raise `UsageError` if there are two."""
    if name is not None and hub:
        raise UsageError(
            f"{name} and -hf {hub[0].removeprefix('hf:')} exclude each other", "use one of them"
        )
    return hub[0] if hub else name
