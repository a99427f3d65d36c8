"""Find the files of a session: the target, and the drafts to try for it, best first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from specgen.drafters.kinds import WORDS, is_word
from specgen.errors import ModelFileError, UsageError
from specgen.models.files import FileIdentity, heads_file, identity_of
from specgen.models.hub_names import (
    PREFIX,
    check_no_address,
    looks_like_reference,
    parse_reference,
)
from specgen.models.registry import CatalogueModel, Registry, load_registry
from specgen.models.stored_models import (
    RegistryModelFinder,
    find_stored,
    named_stored,
    prefix_of,
    shown_name,
    stored_models,
)
from specgen.options import DraftSource, ModelChoice
from specgen.session.saved_drafts import SavedDraft, saved_draft
from specgen.system.files import named_file, named_path, path_of
from specgen.system.folders import cache_folder

#: Fetches the model with a name in the registry or on the hub, and returns its path.
Fetch = Callable[[str], Path]
#: The general draft is used for targets of at least this many times its size: a draft that is not
#: much faster than the target cannot pay.
_MIN_RATIO = 4


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft to try for a target."""

    #: A file, or a word such as ``ngram``.
    draft: DraftSource
    #: Why it was chosen; empty if the user named it.
    why: str = ""
    #: How to find a better one.
    advice: str = ""
    #: Whether its gain for this target was measured.
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a session."""

    #: The target's file.
    target: Path
    #: The drafts to try, best first.
    drafts: tuple[DraftChoice, ...]
    #: What drafts for the draft model, then what drafts for that one, and so on.
    further_drafts: tuple[DraftSource, ...] = ()

    @property
    def draft(self) -> DraftSource:
        """The first draft to try."""
        return self.drafts[0].draft


# --- what the user named --------------------------------------------------------------------------


def find_models(
    choice: ModelChoice,
    *,
    quiet: bool = False,
    registry: Registry | None = None,
    fetch: Fetch | None = None,
) -> Sources:
    """Find the files of the target and of the drafts, downloading those that are missing.

    If the user named no target, the default pair is used: its draft is downloaded too, unless a
    draft was saved for its target. If the user named a draft, or a pair, only that draft is tried;
    otherwise `choose_drafts` picks the drafts.

    Args:
        choice: What the user named.
        quiet: Whether to hide the progress of downloads.
        registry: The models that are known by name; None reads the user's registry.
        fetch: Fetches a model; None downloads it.

    Raises:
        UsageError: If both a target and a pair are named.
        UnknownModelError: If a name is not in the registry.
        FetchError: If a model cannot be downloaded.
        ModelFileError: If a file does not exist or cannot be used.
    """
    from specgen.llama.mtp_layers import mtp_of

    registry = registry or load_registry()
    fetch = fetch or fetching(registry, quiet=quiet)
    target = choice.target
    draft = choice.draft
    if target is not None and choice.pair is not None:
        hint = "use one of them; with --pair, --draft replaces the pair's draft"
        raise UsageError(
            f"--target {target} and --pair {choice.pair} cannot be used together", hint
        )
    pair = None
    if target is None:
        pair = registry.pair(choice.pair or registry.default_pair)
        target = pair.target
        if draft is None and choice.pair is not None:
            draft = pair.draft
    path = find_model(target, registry, fetch)
    further_drafts: list[DraftSource] = [
        name if name == "ngram" else find_model(name, registry, fetch)
        for name in choice.further_drafts
    ]
    identity = identity_of(path)
    if draft is not None:
        drafts: tuple[DraftChoice, ...] = (DraftChoice(_named_draft(draft, path, registry, fetch)),)
    else:
        saved = saved_draft(identity)
        if pair is not None and saved is None and pair.draft != "ngram":
            find_model(pair.draft, registry, fetch)
        drafts = choose_drafts(identity, saved, registry, mtp=mtp_of(path))
    return Sources(path, drafts, tuple(further_drafts))


def _named_draft(
    name: str,
    target: Path,
    registry: Registry,
    fetch: Fetch,
) -> DraftSource:
    """Return the draft that the user named: a model's file, or a word such as ``ngram``."""
    words = ("none", *WORDS)
    is_model = (
        name in registry.models or named_path(name) is not None or prefix_of(name) is not None
    )
    # The words that are listed to users always win. Other words, which plugins may accept, are
    # words only if no model has that name.
    if name not in words and (is_model or not is_word(name)):
        return find_model(name, registry, fetch, others=words)
    if name == "mtp":
        from specgen.llama.mtp_layers import mtp_of

        # If the target has no MTP layers, opening the draft "mtp" raises an error that says why.
        return mtp_of(target) or name
    if name == "heads":
        heads = heads_file(cache_folder(), identity_of(target))
        if named_path(heads) is None:
            hint = f"`specgen draft make -m {target}` makes them"
            raise UsageError(f"--draft heads: none were made for {target.name}", hint)
        return heads
    return name


def find_target(name: str, *, quiet: bool) -> Path:
    """Return the file of a target, downloading it if it is missing.

    Raises:
        UnknownModelError: If the name is not in the registry.
        FetchError: If the model cannot be downloaded.
        ModelFileError: If the file does not exist or cannot be read.
    """
    registry = load_registry()
    path = find_model(name, registry, fetching(registry, quiet=quiet))
    identity_of(path)  # raises if the file cannot be read
    return path


def find_model(
    name: str,
    registry: Registry,
    fetch: Fetch,
    others: Iterable[str] = (),
) -> Path:
    """Return the file of a model, fetched if it is missing.

    Args:
        name: A model on the hub (``hf:...``), a path, a name in the registry, or the name of
            another program's model (``ollama:...``).
        registry: The models that are known by name.
        fetch: Fetches a model.
        others: More words to suggest if the name is unknown and similar to one of them.

    Raises:
        UnknownModelError: If no model has the name, several have it, or it is an address.
        ModelFileError: If the name looks like one on the hub without ``hf:``, and is not a file's.
        FetchError: If the model cannot be fetched.
    """
    if name.startswith(PREFIX):
        return fetch(name)
    path = path_of(name)
    exists = named_path(name) is not None
    if not exists:
        if prefix_of(name) is not None:
            return named_stored(name).path
        check_no_address(name)
    # The stores of other programs are searched only for names that mean nothing else.
    if name and not exists and name not in registry.models:
        stored = find_stored(name)
        if stored is not None:
            return stored.path
    separators = (os.sep, os.altsep or os.sep)
    looks_like_path = name.endswith(".gguf") or any(each in name for each in separators)
    # A name in the registry wins over a file of that name. A missing file is reported later, when
    # it is opened.
    if name and name not in registry.models and (looks_like_path or exists):
        if looks_like_reference(name) and not exists:
            raise ModelFileError(f"{name}: no such file", f"a model on the hub is {PREFIX}{name}")
        return path
    if path.suffix:  # perhaps a misspelt file name: suggest the files next to it, too
        others = [*others, *(each.name for each in path.parent.glob("*.gguf"))]
    if name not in registry.models:
        others = [*others, *(each.name for each in stored_models())]
    return fetch(registry.model(name, others).name)


def fetching(registry: Registry, *, quiet: bool) -> Fetch:
    """Return a function that downloads models, with progress on standard error unless `quiet`."""
    from specgen.models.download import fetch, fetch_reference, stderr_progress

    def download(name: str) -> Path:
        progress = stderr_progress(quiet=quiet)
        if name.startswith(PREFIX):
            return fetch_reference(parse_reference(name), progress=progress)
        return fetch(registry.model(name), progress=progress)

    return download


# --- the drafts for a target, if the user names none ----------------------------------------------


def choose_drafts(
    target: FileIdentity,
    saved: SavedDraft | None,
    registry: Registry,
    *,
    mtp: DraftSource | None = None,
    locate: Callable[[CatalogueModel], Path | None] | None = None,
) -> tuple[DraftChoice, ...]:
    """Return the drafts to try for a target, best first.

    In this order: the saved draft, the target's MTP layers, its partner in the registry, the
    general draft if it is much smaller than the target, and n-grams, which always load. Models are
    tried only if they are on this disk already.

    Args:
        target: The target's file.
        saved: The draft that was saved for it, if any.
        registry: The models that are known by name.
        mtp: The target's MTP layers, if it has any.
        locate: Returns the file of a model in the registry; None if it is not on this disk. By
            default, a `RegistryModelFinder` looks for it.

    Returns:
        The choices; only "none" if a measurement found that no draft pays.
    """
    locate = locate or RegistryModelFinder().find
    by = f"as `specgen draft find --save` found best for {target.name}"
    #: Precedes the reason for any other choice, if the saved draft is missing.
    missing_note = ""
    measured: list[DraftChoice] = []
    if saved is not None:
        if saved.draft == "none":
            return (DraftChoice("none", f"not drafting, {by}", is_measured=True),)
        if isinstance(saved.draft, Path) and named_file(saved.draft) is None:
            missing_note = (
                f"{saved.draft}, saved as the draft for {target.name}, no longer exists; "
            )
        else:
            gain = f": {saved.gain}" if saved.gain else ""
            why = f"drafting with {name_of(saved.draft)}, {by}{gain}"
            measured.append(DraftChoice(saved.draft, why, is_measured=True))
    unmeasured = chain(
        _own_layers(mtp),
        _partner(target, registry, locate),
        _general_draft(target, registry, locate),
        [_NGRAMS],
    )
    noted = (replace(choice, why=missing_note + choice.why) for choice in unmeasured)
    # The first choice of each draft, in order: several rules may choose the same file.
    choices: dict[DraftSource, DraftChoice] = {}
    for choice in chain(measured, noted):
        choices.setdefault(choice.draft, choice)
        if choice.draft == "ngram":  # it always loads, so later choices would never be tried
            break
    return tuple(choices.values())


#: The last choice, which always loads.
_NGRAMS = DraftChoice(
    "ngram", "drafting with n-grams", "`specgen draft find` tries what is on this disk"
)


def _own_layers(mtp: DraftSource | None) -> Iterator[DraftChoice]:
    if isinstance(mtp, Path):
        yield DraftChoice(mtp, f"drafting with {mtp.name}, MTP layers next to the target")
    elif mtp is not None:
        yield DraftChoice(mtp, "drafting with the target's own MTP layers")


def _partner(
    target: FileIdentity,
    registry: Registry,
    locate: Callable[[CatalogueModel], Path | None],
) -> Iterator[DraftChoice]:
    """Yield the draft of the first pair in the registry whose draft is on this disk.

    A pair with n-grams counts as such a pair.
    """
    model = registry.recognise(target)
    if model is None:
        return
    for pair in registry.pairs_for(model):
        if pair.draft == "ngram":
            why = f"drafting with n-grams, since the pair {pair.name} has no draft model"
            yield DraftChoice("ngram", why)
            return
        path = locate(registry.model(pair.draft))
        if path is not None:
            role = f"the draft of {pair.target} in the pair {pair.name}"
            yield DraftChoice(path, f"drafting with {name_of(path)}, {role}")
            return


def _general_draft(
    target: FileIdentity,
    registry: Registry,
    locate: Callable[[CatalogueModel], Path | None],
) -> Iterator[DraftChoice]:
    """Yield the general draft, if it is on this disk and much smaller than the target."""
    if registry.general_draft is None:
        return
    general = registry.model(registry.general_draft)
    is_small = _MIN_RATIO * general.size_bytes <= target.size_bytes
    if not is_small or general == registry.recognise(target):
        return
    path = locate(general)
    if path is not None:
        why = f"drafting with {name_of(path)}, the general draft"
        yield DraftChoice(path, why, "`specgen draft find` looks for a better one")


def name_of(draft: DraftSource) -> str:
    """Return the name of a draft that messages show to users."""
    if isinstance(draft, Path):
        return shown_name(draft)
    return {"mtp": "MTP layers", "ngram": "n-grams"}.get(draft, draft)
