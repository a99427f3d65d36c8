"""Find the files of a session: the target, and the drafts that may be tried for it, the best first."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from specgen.drafters.kinds import WORDS, is_word
from specgen.errors import ModelFileError, UsageError
from specgen.models.files import FileIdentity, cache_folder, config_folder, heads_file, identity_of
from specgen.models.hub_names import PREFIX, locate, looks_like_reference, parse_reference
from specgen.models.registry import CatalogueModel, Registry, load_registry
from specgen.options import DraftSource, ModelChoice
from specgen.system.files import correct, replace_json, write_errors
from specgen.system.progress import measured_gain

#: Fetches the model with a name in the registry or on the hub, and returns its path.
Fetch = Callable[[str], Path]
#: The general draft is for targets of at least this many times its bytes: one that is not much
#: quicker cannot pay.
_MIN_RATIO = 4


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft, `why` it was chosen (empty: the user named it), `advice` how to find a better one,
    and whether its gain for this target `is_measured`.
    """

    draft: DraftSource
    why: str = ""
    advice: str = ""
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a session: the target, the drafts in the order in which to try them, and
    `helpers`, the drafts of the draft model, of that one, and so on.
    """

    target: Path
    drafts: tuple[DraftChoice, ...]
    helpers: tuple[DraftSource, ...] = ()

    @property
    def draft(self) -> DraftSource:
        return self.drafts[0].draft


def find_models(
    choice: ModelChoice,
    *,
    quiet: bool = False,
    registry: Registry | None = None,
    fetch: Fetch | None = None,
) -> Sources:
    """Find the target and the drafts; models that are not here are fetched. Without a target it is
    the default pair's, whose draft is fetched if none is saved. A named draft, or that of a named
    pair, replaces those of `choose_drafts`. Raise `UsageError`, `UnknownModelError`, `FetchError`
    or `ModelFileError`.
    """
    from specgen.llama.gguf_file import mtp_of

    registry = registry or load_registry()
    fetch = fetch or fetching(registry, quiet=quiet)
    target, draft = choice.target, choice.draft
    if target is not None and choice.pair is not None:
        hint = "use one of them; with --pair, --draft replaces the pair's draft"
        raise UsageError(f"--target {target} and --pair {choice.pair} exclude each other", hint)
    pair = registry.pair(choice.pair or registry.default_pair) if target is None else None
    if pair is not None:
        target = pair.target
        draft = pair.draft if draft is None and choice.pair is not None else draft
    assert target is not None
    path = find_model(target, registry, fetch)
    helpers: list[DraftSource] = [
        name if name == "ngram" else find_model(name, registry, fetch) for name in choice.helpers
    ]
    identity = identity_of(path)
    if draft is not None:
        drafts: tuple[DraftChoice, ...] = (DraftChoice(_named_draft(draft, path, registry, fetch)),)
    else:
        saved = saved_draft(identity)
        if pair is not None and saved is None and pair.draft != "ngram":
            find_model(pair.draft, registry, fetch)
        drafts = choose_drafts(identity, saved, registry, mtp=mtp_of(path))
    return Sources(path, drafts, tuple(helpers))


def _named_draft(name: str, target: Path, registry: Registry, fetch: Fetch) -> DraftSource:
    words = ("none", *WORDS)
    is_model = name in registry.models or _exists(Path(name))
    if name not in words and (is_model or not is_word(name)):
        return find_model(name, registry, fetch, others=words)
    if name == "mtp":
        from specgen.llama.gguf_file import mtp_of

        return mtp_of(target) or name  # without any, opening the draft says why
    if name != "heads":
        return name
    heads = heads_file(cache_folder(), identity_of(target))
    if not _exists(heads):
        hint = f"`specgen draft make -m {target}` makes them"
        raise UsageError(f"--draft heads: none were made for {target.name}", hint)
    return heads


def find_target(name: str, *, quiet: bool) -> Path:
    registry = load_registry()
    path = find_model(name, registry, fetching(registry, quiet=quiet))
    identity_of(path)
    return path


def find_model(name: str, registry: Registry, fetch: Fetch, others: Iterable[str] = ()) -> Path:
    """Return the file of a model: on the hub (``hf:``), a path, or a model's name in the registry;
    `others` are words that may have been meant. Raise `UnknownModelError` or `FetchError`.
    """
    if name.startswith(PREFIX):
        return fetch(name)
    path = Path(name).expanduser()
    separators = [os.sep, os.altsep or os.sep]
    looks_like_path = name.endswith(".gguf") or any(separator in name for separator in separators)
    if name and name not in registry.models and (looks_like_path or _exists(path)):
        if looks_like_reference(name) and not _exists(path):
            raise ModelFileError(f"{name}: no such file", f"a model on the hub is {PREFIX}{name}")
        return path
    if path.suffix:  # a file's name may be misspelt
        others = [*others, *(each.name for each in path.parent.glob("*.gguf"))]
    return fetch(registry.model(name, others).name)


def fetching(registry: Registry, *, quiet: bool) -> Fetch:
    from specgen.models.download import fetch, fetch_reference, stderr_progress

    def get(name: str) -> Path:
        progress = stderr_progress(quiet=quiet)
        if name.startswith(PREFIX):
            return fetch_reference(parse_reference(name), progress=progress)
        return fetch(registry.model(name), progress=progress)

    return get


#: Unlike `Path.exists`, this is False for a name that is too long.
_exists = os.path.exists


# --- the drafts for a target, if the user names none ----------------------------------------------


def choose_drafts(
    target: FileIdentity,
    saved: SavedDraft | None,
    registry: Registry,
    *,
    mtp: DraftSource | None = None,
    locate: Callable[[CatalogueModel], Path | None] = locate,
) -> tuple[DraftChoice, ...]:
    """Return the drafts for a target, the best first: the `saved` one, its MTP layers (`mtp`), the
    partner in the registry that is here, the general draft if it is much smaller, n-grams, which
    always load.
    """
    gone, found = "", list[DraftChoice]()
    if saved is not None:
        by = f"as `specgen draft find --save` found best for {target.name}"
        if saved.draft == "none":
            return (DraftChoice("none", f"not drafting, {by}", is_measured=True),)
        if not isinstance(saved.draft, Path) or saved.draft.is_file():
            why = f"drafting with {name_of(saved.draft)}, {by}{saved.gain and f': {saved.gain}'}"
            found.append(DraftChoice(saved.draft, why, is_measured=True))
        else:
            gone = f"{saved.draft}, saved as the draft for {target.name}, no longer exists; "
    if mtp is not None:
        whose = "the target's own MTP layers"
        if isinstance(mtp, Path):
            whose = f"{mtp.name}, the target's MTP layers beside it"
        found.append(DraftChoice(mtp, f"{gone}drafting with {whose}"))
    model = registry.recognise(target)
    for pair in registry.pairs_for(model) if model is not None else ():
        if pair.draft == "ngram":
            where = f"since the pair {pair.name} has no draft model"
            found.append(DraftChoice("ngram", f"{gone}drafting with n-grams, {where}"))
        elif (path := locate(registry.model(pair.draft))) is not None:
            where = f"the partner of {pair.target} in the pair {pair.name}"
            found.append(DraftChoice(path, f"{gone}drafting with {path.name}, {where}"))
            break
    if registry.general_draft is not None:
        general = registry.model(registry.general_draft)
        is_small = _MIN_RATIO * general.size_bytes <= target.size_bytes
        if is_small and general != model and (path := locate(general)) is not None:
            why = f"{gone}drafting with {path.name}, the general draft"
            advice = "`specgen draft find` looks for a better one"
            found.append(DraftChoice(path, why, advice))
    advice = "`specgen draft find` tries what is on this disk"
    found.append(DraftChoice("ngram", f"{gone}drafting with n-grams", advice))
    n_tried = next(n for n, choice in enumerate(found, 1) if choice.draft == "ngram")
    choices: dict[DraftSource, DraftChoice] = {}
    for choice in found[:n_tried]:
        choices.setdefault(choice.draft, choice)
    return tuple(choices.values())


def name_of(draft: DraftSource) -> str:
    if isinstance(draft, Path):
        return draft.name
    return {"mtp": "MTP layers", "ngram": "n-grams"}.get(draft, draft)


# --- saved drafts: those of `specgen draft find --save` and `specgen draft make`, in drafts.json in the configuration
# folder, which people may repair. A target is identified by the name and the size of its file, so that it may be moved.


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """A draft that was chosen by measuring, when, and its speed-up over plain decoding."""

    draft: DraftSource
    date: datetime.date | None = None
    speedup: FiniteFloat | None = None
    worst_speedup: FiniteFloat | None = None
    best_speedup: FiniteFloat | None = None
    n_answers: int = 0

    @property
    def gain(self) -> str:
        """What was measured, in words; empty if the file does not have all of it."""
        if self.speedup is None or self.worst_speedup is None or self.best_speedup is None:
            return ""
        return measured_gain(self.speedup, self.worst_speedup, self.best_speedup, self.n_answers)


def saved_drafts_file() -> Path:
    return config_folder() / "drafts.json"


def saved_draft(target: FileIdentity) -> SavedDraft | None:
    """Return the draft that was saved for a target. Raise `UsageError` if the file is damaged."""
    entry = _read()["drafts"].get(_key(target))
    if entry is None:
        return None
    draft = entry.get("draft") if isinstance(entry, dict) else None
    if not isinstance(draft, str) or not draft:
        raise _damaged(f'"{_key(target)}": draft: is no path, and no word after --draft')
    source = draft if draft == "none" or is_word(draft) else Path(draft)
    try:
        return TypeAdapter(SavedDraft).validate_python({**entry, "draft": source})
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(f'"{_key(target)}": {first["loc"][0]}: {first["msg"]}') from error


def save_draft(target: FileIdentity, saved: SavedDraft) -> None:
    """Save a draft for a target, replacing an earlier one. Raise `UsageError`, `OutputError`."""
    path, document = saved_drafts_file(), _read()
    values = TypeAdapter(SavedDraft).dump_python(saved, mode="json", exclude_none=True)
    if isinstance(saved.draft, Path):
        values["draft"] = str(saved.draft.absolute())
    document["drafts"][_key(target)] = values
    with write_errors(path, "set SPECGEN_CONFIG to another folder"):
        replace_json(path, document)


def _read() -> dict[str, Any]:
    path = saved_drafts_file()
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too
        raise _damaged(f"is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.setdefault("drafts", {}), dict):
        raise _damaged("is not a JSON object with an object named drafts")
    return document


def _damaged(problem: str) -> UsageError:
    path = saved_drafts_file()
    return UsageError(f"{path}: {problem}", correct(path))


def _key(target: FileIdentity) -> str:
    return f"{target.name}, {target.size_bytes} bytes"
