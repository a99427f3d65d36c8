"""OpenAI's embeddings: ``/v1/embeddings``."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, Field

from specgen.errors import PromptError
from specgen.serve.formats.completions import PromptInput, prompt_inputs
from specgen.serve.formats.fields import Fields, Json, parse
from specgen.serve.formats.request_errors import BodyError
from specgen.session.prompts.tokens import tokens_of
from specgen.system.arrays import Hidden

if TYPE_CHECKING:
    from specgen.llama.embeddings import Embedder

#: Writes the body of a response in the format of an API; see `embedding_response`.
WriteEmbeddings: TypeAlias = Callable[[Sequence[str], int, str, Sequence[str]], bytes]
#: The maximum number of inputs of a request, OpenAI's limit.
_MAX_INPUTS = 2048


class EmbeddingsRequest(Fields):
    """The body of a request for embeddings."""

    #: A text or tokens, or a list of these; ``prompt`` in Ollama's older API.
    input: Any = Field(None, validation_alias=AliasChoices("input", "prompt"))
    encoding_format: Literal["float", "base64"] = "float"
    #: The number of values of each vector.
    dimensions: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingTask:
    """A request for embeddings that was read and checked."""

    #: The tokens of each input.
    tokens: tuple[list[int], ...]
    #: Whether vectors are written in base64, instead of as lists of numbers.
    is_base64: bool = False
    #: The number of values of each vector; None for all.
    dimensions: int | None = None
    #: The fields that were ignored, and why.
    warnings: tuple[str, ...] = ()

    def encoded(self, vector: Hidden) -> str:
        """Return a vector as JSON, cut to `dimensions` values and normalized again if it is cut."""
        from specgen.llama.embeddings import unit

        if self.dimensions is not None:
            vector = unit(vector[: self.dimensions])
        if self.is_base64:
            return json.dumps(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        return json.dumps(vector.tolist())


def read_embedding_request(body: Json, embedder: Embedder) -> EmbeddingTask:
    """Read a request for embeddings by this model.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(EmbeddingsRequest, body)
    warnings = fields.warnings()
    if fields.dimensions is not None and fields.dimensions > embedder.n_embd:
        raise BodyError("dimensions", f"{fields.dimensions} is more than {embedder.n_embd}")
    if fields.dimensions not in (None, embedder.n_embd):
        warnings.append("dimensions: only vectors of a model that was trained for it can be cut")
    inputs = prompt_inputs("input", fields.input)
    if len(inputs) > _MAX_INPUTS:
        raise BodyError("input", f"at most {_MAX_INPUTS} inputs are allowed")
    return EmbeddingTask(
        tuple(_tokens(embedder, where, value) for where, value in inputs.items()),
        is_base64=fields.encoding_format == "base64",
        dimensions=fields.dimensions,
        warnings=tuple(warnings),
    )


def _tokens(
    embedder: Embedder,
    where: str,
    value: PromptInput,
) -> list[int]:
    """Return the tokens of an input at the place `where` of the body."""
    try:
        if isinstance(value, str):
            return embedder.tokenize(value)
        tokens = tokens_of(embedder.model.vocabulary, value, parse_special=False)
        embedder.check(tokens)
    except PromptError as error:
        raise BodyError(where, error.message) from None
    return tokens


def embedding_response(
    vectors: Sequence[str],
    n_tokens: int,
    model: str,
    warnings: Sequence[str],
) -> bytes:
    """Return the body of a response.

    Args:
        vectors: The vectors as JSON, which is joined as it is: there may be millions of values.
        n_tokens: The number of tokens of all inputs.
        model: The name of the model.
        warnings: The fields that were ignored, and why.
    """
    data = ", ".join(
        f'{{"object": "embedding", "index": {index}, "embedding": {vector}}}'
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    rest: Json = {"model": model, "usage": usage}
    if warnings:
        rest["warnings"] = list(warnings)
    # Without its opening bracket, `rest` continues the object.
    return f'{{"object": "list", "data": [{data}], {json.dumps(rest)[1:]}'.encode()
