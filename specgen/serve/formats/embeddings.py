"""Requests for embeddings and their responses, in OpenAI's form."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from specgen.errors import PromptError
from specgen.serve.formats.fields import Body, BodyError, Integer, parse, shown
from specgen.system.arrays import Hidden

#: A text, or its tokens.
EmbeddingInput: TypeAlias = str | list[int]
#: The most inputs of a request, as at OpenAI.
_N_INPUTS = 2048


class _Body(Body):
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """The inputs of a request, the form of its vectors, and how many of their values are wanted (None: all)."""

    inputs: tuple[EmbeddingInput, ...]
    #: The name of an input's field, for errors.
    names: tuple[str, ...]
    is_base64: bool = False
    dimensions: int | None = None
    warnings: tuple[str, ...] = ()

    def tokens(
        self, tokenize: Callable[[str], list[int]], check: Callable[[Sequence[int]], None]
    ) -> list[list[int]]:
        """Return the tokens of the inputs. Raise `BodyError` for what these functions refuse."""

        def read(name: str, each: EmbeddingInput) -> list[int]:
            try:
                if isinstance(each, str):
                    return tokenize(each)
                check(each)
            except PromptError as error:
                raise BodyError(name, error.message) from None
            return each

        return list(map(read, self.names, self.inputs))

    def encoded(self, vector: Hidden) -> str:
        """Return a vector as JSON."""
        if self.is_base64:
            return json.dumps(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        return json.dumps(vector.tolist())


def read_embedding_request(body: Mapping[str, Any], n_embd: int) -> EmbeddingRequest:
    """Read a body for a model whose vectors have `n_embd` values. Raise `BodyError`."""
    asked = parse(_Body, body)
    if asked.dimensions is not None and asked.dimensions > n_embd:
        raise BodyError("dimensions", f"{asked.dimensions} is more than {n_embd}")
    warnings = asked.warnings()
    if asked.dimensions not in (None, n_embd):
        warnings.append("dimensions: only vectors of a model that was trained for it can be cut")
    is_single = isinstance(asked.input, str) or _is_tokens(asked.input)
    inputs = [asked.input] if is_single else asked.input
    if not isinstance(inputs, list) or not inputs:
        raise BodyError("input", "it is no text, list of tokens, or list of these")
    if len(inputs) > _N_INPUTS:
        raise BodyError("input", f"{len(inputs)} inputs; at most {_N_INPUTS} are allowed")
    names = ["input"] if is_single else [f"input[{number}]" for number in range(len(inputs))]
    for name, each in zip(names, inputs, strict=True):
        if not _is_tokens(each) and (not isinstance(each, str) or not each):
            raise BodyError(name, "it is empty" if each == "" else f"{shown(each)} is not a text")
    is_base64 = asked.encoding_format == "base64"
    return EmbeddingRequest(
        tuple(inputs), tuple(names), is_base64, asked.dimensions, tuple(warnings)
    )


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def embedding_response(
    vectors: Sequence[str], n_tokens: int, model: str, warnings: Sequence[str]
) -> bytes:
    """Return the body of a response with vectors that are JSON already: there may be millions of values."""
    data = ", ".join(
        f'{{"object": "embedding", "index": {index}, "embedding": {vector}}}'
        for index, vector in enumerate(vectors)
    )
    rest: dict[str, Any] = {
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
    if warnings:
        rest["warnings"] = list(warnings)
    return f'{{"object": "list", "data": [{data}], {json.dumps(rest)[1:]}'.encode()
