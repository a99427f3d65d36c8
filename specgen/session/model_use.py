"""How a model on this disk would be used: whether it can be, with which draft, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specgen.drafters.kinds import refuse_draft
from specgen.errors import BackendError, ModelFileError
from specgen.llama.embeddings import pooling_of
from specgen.llama.file_check import check_file
from specgen.llama.model_description import describe_model
from specgen.llama.mtp_layers import mtp_of
from specgen.models.files import identity_of
from specgen.models.other_programs import StoredModel
from specgen.models.registry import Registry
from specgen.models.stored_models import RegistryModelFinder
from specgen.options import DraftSource, SessionOptions
from specgen.session.choose_models import choose_drafts
from specgen.session.saved_drafts import saved_draft
from specgen.session.weights_memory import budget_within, can_stream
from specgen.system.machine import usable_memory


@dataclass(frozen=True, slots=True)
class ModelUse:
    """How a model on this disk would be used."""

    #: Whether the weights of the model and its draft fit into memory.
    fits_memory: bool | None = None
    #: If they do not fit: the bytes of the model that are read from disk in each pass. None if
    #: they fit, or if the model cannot be streamed.
    streamed_bytes: int | None = None
    #: The draft that commands choose for it without --draft.
    draft: DraftSource | None = None
    #: Why it cannot be used; empty if it can.
    problem: str = ""


def use_of(
    path: Path,
    registry: Registry,
    finder: RegistryModelFinder,
) -> ModelUse:
    """Return how a model would be used. Its metadata is read, but not its weights.

    Args:
        path: The model's first file.
        registry: The models that are known by name.
        finder: Finds the drafts among them.
    """
    problem = problem_with_file(path)
    if problem:
        return ModelUse(problem=problem)
    target = identity_of(path)
    choices = choose_drafts(
        target,
        saved_draft(target),
        registry,
        mtp=mtp_of(path),
        locate=finder.find,
    )
    draft = choices[0].draft
    options = SessionOptions(path, draft)
    budget = budget_within(options, (draft,), usable_memory().amount)
    fits_memory = budget.max_bytes is None
    streamed_bytes = None
    if budget.max_bytes is not None and can_stream(options.target_context):
        streamed_bytes = max(0, target.size_bytes - budget.max_bytes)
    return ModelUse(fits_memory, streamed_bytes, draft)


def problem_with(model: StoredModel) -> str:
    """Return why a program's model cannot be used to generate text; empty if it can."""
    return model.problem or problem_with_file(model.path)


def problem_with_file(path: Path) -> str:
    """Return why a file cannot be used to generate text; empty if it can."""
    problem = why_not_loadable(path)
    if not problem and pooling_of(path) is not None:
        return "an embedding model, which generates no text; `specgen serve` serves it"
    return problem


def why_not_loadable(path: Path) -> str:
    """Return why a file is not a complete model; empty if it is, judging by its metadata."""
    try:
        check_file(path)
        refuse_draft(path)
        describe_model(path)
    except ModelFileError as error:
        return error.message.removeprefix(f"{path}: ")
    except BackendError:
        return "damaged: its metadata cannot be read"
    return ""
