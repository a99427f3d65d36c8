"""The building blocks of all request models: JSON objects with declared fields.

Agents send new fields with each version. A field that specgen does not know is ignored with a
warning; a request is refused only if a known field has an invalid value.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from specgen.errors import did_you_mean
from specgen.option_values import described, place_of
from specgen.serve.formats.request_errors import BodyError, shown

#: A JSON object: a body, an event, or a chunk of a stream.
Json: TypeAlias = dict[str, Any]
#: An integer of 64 bits.
Integer: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
#: A JSON schema that is an object.
Schema: TypeAlias = dict[str, Any]


def _parsed_if_json(value: Any) -> Any:
    """Return the value of a JSON text; anything else as it is, for pydantic to judge."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _checked_schema(value: Any) -> Any:
    if not isinstance(value, (dict, bool)):
        raise ValueError("a JSON schema is an object or a boolean")  # noqa: TRY004 - for pydantic
    return value


#: Lets the text of a JSON value stand for the value, as some clients send it.
OR_JSON_TEXT = BeforeValidator(_parsed_if_json)
#: A JSON schema of any kind, or the text of one.
AnySchema: TypeAlias = Annotated[Any, BeforeValidator(_checked_schema), OR_JSON_TEXT]

#: Unknown fields that do not change the answer: they are ignored without a warning.
_SILENTLY_IGNORED = frozenset(
    [
        "annotations",
        "betas",
        "cache_control",
        "cache_prompt",
        "client_metadata",
        "context_management",
        "eager_input_streaming",
        "guided_decoding_backend",
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
#: The maximum number of unknown fields that an error names.
_MAX_NAMED = 3
_MODEL = TypeVar("_MODEL", bound="Fields")


class Fields(BaseModel):
    """A JSON object in a request. A field that is null counts as missing."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}

    def warnings(self) -> list[str]:
        """Return a warning for each ignored field, including those of objects within this one.

        A field of several items of a list gets only one warning.
        """
        return [
            f"{name[:100]}: ignored, since {reason}"
            for name, reason in dict.fromkeys(self.ignored())
        ]

    @classmethod
    def names(cls) -> Iterator[str]:
        """Yield the names that the fields may have in a body."""
        for name, info in cls.model_fields.items():
            alias = info.validation_alias
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
            for choice in choices:
                yield str(choice.path[0]) if isinstance(choice, AliasPath) else choice

    @classmethod
    def object_names(cls) -> Iterator[str]:
        """Yield the names of the objects in a body that have a field of this model within them."""
        for info in cls.model_fields.values():
            alias = info.validation_alias
            for choice in alias.choices if isinstance(alias, AliasChoices) else [alias]:
                if isinstance(choice, AliasPath):
                    yield str(choice.path[0])

    def ignored(self) -> Iterator[tuple[str, str]]:
        """Yield the ignored fields whose values might have changed the answer.

        Yields:
            The dotted name of a field, and the reason.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (False, "", [], {}) and name not in _SILENTLY_IGNORED:
                yield name, self._why_ignored(name)
        for name in type(self).model_fields:
            values = getattr(self, name)
            if not isinstance(values, list):
                values = [values]
            for value in values:
                if isinstance(value, Fields):
                    for inner_name, reason in value.ignored():
                        yield f"{name}.{inner_name}", reason

    def _why_ignored(self, name: str) -> str:
        """Return the reason why a field of this object is ignored."""
        if name in self.object_names():
            return "specgen uses none of its fields"
        known_names = list(self.names())
        if name in known_names:
            return "the field is also given under another name"
        return f"specgen has no such field{did_you_mean(name, known_names)}"


def parse(model: type[_MODEL], body: Json) -> _MODEL:
    """Read a body as a pydantic model.

    Raises:
        BodyError: If a field is missing or has an invalid value; it names the first such field.
    """
    try:
        fields = model.model_validate(body)
    except ValidationError as error:
        first_error, *other_errors = error.errors(include_url=False)
    else:
        _check_objects(model, body)
        return fields
    keys = _keys_of(first_error, body)
    alternatives = [each for each in other_errors if _keys_of(each, body) == keys]
    reason = described(first_error, shown, alternatives)
    if first_error["type"] == "missing" and len(keys) == 1:
        reason += unknown_fields(model, body)
    raise BodyError(place_of(keys).removeprefix("."), reason)


def _check_objects(model: type[Fields], body: Json) -> None:
    """Raise `BodyError` if something else is in place of an object that has a field within it.

    Pydantic ignores that. An empty value counts as missing.
    """
    for name in model.object_names():
        value = body.get(name)
        if value and not isinstance(value, dict):
            raise BodyError(name, f"give an object, not {shown(value)}")


def _keys_of(error: Mapping[str, Any], body: Json) -> tuple[int | str, ...]:
    """Return the keys that lead from a body to a wrong value.

    If a value may have several types, pydantic adds the name of the type as a last key, which the
    body does not have.
    """
    keys: tuple[int | str, ...] = error["loc"]
    value: Any = body
    try:
        for key in keys[:-1]:
            value = value[key]
    except (IndexError, KeyError, TypeError):  # the field has another name or form in the body
        return keys
    if error["type"] != "missing" and value == error["input"]:
        return keys[:-1]
    return keys


def unknown_fields(
    model: type[Fields],
    body: Json,
    other_names: Sequence[str] = (),
) -> str:
    """Name the fields of a body that a model does not have, as the end of a sentence.

    It is for errors about a missing field, whose name may be misspelled.

    Args:
        model: The model of the body.
        body: The body.
        other_names: Fields of other models that may be meant.

    Returns:
        The end of the sentence; empty if all fields are known.
    """
    known_names = [*model.names(), *other_names]
    unknown_names = [name for name in body if name not in {*known_names, *_SILENTLY_IGNORED}]
    if not unknown_names:
        return ""
    label = "unknown field" if len(unknown_names) == 1 else "unknown fields"
    named = [
        f"{name[:100]}{did_you_mean(name, known_names)}" for name in unknown_names[:_MAX_NAMED]
    ]
    return f"; {label}: {', '.join(named)}"


# --- contents of messages -------------------------------------------------------------------------


#: The fields of the parts of a message that have an image or another file, in all APIs.
_FILE_FIELDS = frozenset(
    ["audio", "file", "file_data", "file_id", "file_url", "image_url", "input_audio", "source"]
)


class Part(Fields):
    """A part of a message: a text, or something that this server cannot read, such as an image."""

    type: str = "text"
    text: str | None = None
    #: The text with which a model refused to answer, in place of `text`.
    refusal: str | None = None

    def _why_ignored(self, name: str) -> str:
        if name in _FILE_FIELDS:
            return "this model reads text"
        return super()._why_ignored(name)


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        value = {"text": value}
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"give a text or a list of parts, not {shown(value)}")  # noqa: TRY004
    return value


#: Lets a text, or a single part, stand for a list of parts.
AS_PARTS = BeforeValidator(_as_parts)
Parts: TypeAlias = Annotated[list[Part], AS_PARTS]


def is_text(part: Part) -> bool:
    """Return whether a part of a message can be shown to the model as it is."""
    return part.text is not None or part.refusal is not None or part.type.endswith("text")


def text_of(parts: Sequence[Part], separator: str = "\n") -> str:
    """Join the texts of the parts of a message.

    A part that is not a text is replaced with a remark: an error would stop an agent.
    """
    texts: list[str] = []
    for part in parts:
        text = part.text
        if text is None:
            text = part.refusal
        if not is_text(part):
            kind = part.type.removeprefix("input_").removesuffix("_url")
            text = f"[{kind[:40]} left out: this model reads text]"
        if text:
            texts.append(text)
    return separator.join(texts)
