"""The options that name models: files, names of the registry, and repositories of the hub."""

from __future__ import annotations

from typing import Any

from typer import Option

from specgen.cli.flags.groups import group, panel
from specgen.options import ModelChoice, staged


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
    """Return the option that names a target. (`specgen.cli.llama_cpp_options` makes -m of -hf, and -md of -hfd.)"""
    usual: dict[str, Any] = {
        "help": "The target: a GGUF file, a name from `specgen models list`, or hf:USER/REPO:QUANT on the "
        "Hugging Face hub, for which -hf USER/REPO:QUANT is the same.",
        "autocompletion": model_names,
    }
    return Option("--target", "--model", "-m", metavar="FILE|NAME", **(usual | settings))


def draft_model_option(**settings: Any) -> Any:
    """Return the option that names a small model."""
    return Option("--draft", "--model-draft", "-md", metavar="FILE|NAME", **settings)


_MODELS = panel(
    "Models",
    target=target_option(
        help="The target: a GGUF file, a name from `specgen models list`, or hf:USER/REPO:QUANT on the "
        "Hugging Face hub, for which -hf USER/REPO:QUANT is the same. Without QUANT it is Q4_K_M, else Q8_0, "
        "else the repository's first model; --hf-file names one of its files. HF_TOKEN (or --hf-token) opens "
        "gated and private repositories.",
        show_default="the default pair's",
    ),
    draft=Option(
        "--draft",
        "--model-draft",
        "-md",
        metavar="FILE|NAME|mtp|ngram|none",
        autocompletion=draft_names,
        help="What drafts: a file or a name as for the target (-hfd on the hub), `mtp` (the target's own layers), "
        "`ngram` (repetitions of the text so far), `heads` (made by `specgen draft make`), or `none`. A second "
        "--draft drafts for the first.",
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


@group(ModelChoice, _MODELS)
def models(
    *, target: str | None = None, draft: list[str] | None = None, pair: str | None = None
) -> ModelChoice:
    """Return the models as the user named them. Raise `UsageError`."""
    return staged(target, draft or (), pair)
