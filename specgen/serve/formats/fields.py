"""The building blocks of all request models: JSON objects with declared fields.

Agents send new fields with each version. A field that specgen lacks is ignored with a warning, and
only what makes no sense is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specgen.serve.formats.request_errors import BodyError, shown

#: A JSON object: a body, an event, or a chunk of a stream.
Json: TypeAlias = dict[str, Any]
#: An integer of 64 bits.
Integer: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
#: A JSON schema that is an object.
Schema: TypeAlias = dict[str, Any]

#: Fields that specgen lacks and that nobody would miss: they are ignored without a warning.
_SILENT = frozenset(
    [
        "annotations",
        "betas",
        "cache_control",
        "cache_prompt",
        "client_metadata",
        "context_management",
        "id",
        "id_slot",
        "keep_alive",
        "logprobs",
        "metadata",
        "model",
        "name",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "signature",
        "status",
        "stream_options",
        "strict",
        "summary",
        "t_max_prompt_ms",
        "type",
        "user",
    ]
)
_MODEL = TypeVar("_MODEL", bound="Fields")


class Fields(BaseModel):
    """A JSON object in a request. A field that is null counts as missing."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None}

    def warnings(self) -> list[str]:
        """Return a warning for the name of each ignored field, here and in objects within."""
        names = dict.fromkeys(self.ignored())
        return [f"{name[:100]}: ignored, since specgen has no such field" for name in names]

    def ignored(self) -> Iterator[str]:
        """Yield the names of ignored fields that might have asked for something."""
        for name, value in (self.model_extra or {}).items():
            if value not in (False, "", [], {}) and name not in _SILENT:
                yield name
        for name in type(self).model_fields:
            values = getattr(self, name)
            if not isinstance(values, list):
                values = [values]
            for value in values:
                if isinstance(value, Fields):
                    yield from (f"{name}.{inner}" for inner in value.ignored())


def parse(model: type[_MODEL], body: Json) -> _MODEL:
    """Return a body as a model. Raise `BodyError` for the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    what = first["msg"]
    if first["type"] == "model_type":  # its message names a class of Python
        what = "Input should be an object"
    if first["type"] != "missing":
        what += f"; it is {shown(first['input'])}"
    place = ""
    for key in first["loc"]:
        if isinstance(key, int):
            place += f"[{key}]"
        else:
            place += f".{key}"
    raise BodyError(place.removesuffix(".[key]").removeprefix("."), what)


# --- contents of messages -------------------------------------------------------------------------


class Part(Fields):
    """A part of a message: a text, or something that no local model reads."""

    type: str = "text"
    text: str | None = None
    #: A text with which a model has refused to answer.
    refusal: str | None = None


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        value = {"text": value}
    if isinstance(value, dict):
        return [value]
    return value


#: Lets a text, or a single part, stand for a list of parts.
AS_PARTS = BeforeValidator(_as_parts)
Parts: TypeAlias = Annotated[list[Part], AS_PARTS]


def text_of(parts: Sequence[Part], separator: str = "\n") -> str:
    """Return the texts of a content, joined.

    What no local model reads is replaced by a remark, since a refusal would end an agent.
    """
    texts: list[str] = []
    for part in parts:
        text = part.text
        if text is None:
            text = part.refusal
        if text is None and not part.type.endswith("text"):
            kind = part.type.removeprefix("input_").removesuffix("_url")
            text = f"[{kind[:40]} left out: this model reads text]"
        if text:
            texts.append(text)
    return separator.join(texts)
