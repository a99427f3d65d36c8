"""Requests for embeddings and their responses, in OpenAI's form."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from specgen.errors import PromptError
from specgen.llama.embeddings import Embedder, unit
from specgen.serve.formats.fields import Body, BodyError, Integer, parse, shown
from specgen.system.arrays import Hidden

#: The most inputs of a request, as at OpenAI.
_N_INPUTS = 2048


class _Body(Body):
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """The tokens of the inputs of a request, the form of its vectors, and how many of their values are wanted
    (None: all)."""

    tokens: tuple[list[int], ...]
    is_base64: bool = False
    dimensions: int | None = None
    warnings: tuple[str, ...] = ()

    def encoded(self, vector: Hidden) -> str:
        if self.dimensions is not None:
            vector = unit(vector[: self.dimensions])
        if self.is_base64:
            return json.dumps(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        return json.dumps(vector.tolist())


def read_embedding_request(body: Mapping[str, Any], embedder: Embedder) -> EmbeddingRequest:
    """Read a body for a model. Raise `BodyError`."""
    asked = parse(_Body, body)
    warnings = asked.warnings()
    if asked.dimensions is not None and asked.dimensions > embedder.n_embd:
        raise BodyError("dimensions", f"{asked.dimensions} is more than {embedder.n_embd}")
    if asked.dimensions not in (None, embedder.n_embd):
        warnings.append("dimensions: only vectors of a model that was trained for it can be cut")
    is_single = isinstance(asked.input, str) or _is_tokens(asked.input)
    inputs = [asked.input] if is_single else asked.input
    if not isinstance(inputs, list) or not 0 < len(inputs) <= _N_INPUTS:
        what = f"it is no text, list of tokens, or list of at most {_N_INPUTS} of these"
        raise BodyError("input", what)
    tokens = []
    for number, each in enumerate(inputs):
        name = "input" if is_single else f"input[{number}]"
        if not _is_tokens(each) and (not isinstance(each, str) or not each):
            raise BodyError(name, "it is empty" if each == "" else f"{shown(each)} is not a text")
        try:
            tokens.append(embedder.tokenize(each) if isinstance(each, str) else each)
            embedder.check(tokens[-1])
        except PromptError as error:
            raise BodyError(name, error.message) from None
    is_base64 = asked.encoding_format == "base64"
    return EmbeddingRequest(tuple(tokens), is_base64, asked.dimensions, tuple(warnings))


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
