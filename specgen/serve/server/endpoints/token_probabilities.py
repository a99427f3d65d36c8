"""The endpoint that scores an answer: how likely its tokens were to the target and the draft."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from specgen.errors import MemoryLimitError
from specgen.events import TokenLogprob
from specgen.serve.formats.chat_completions import ChatCompletionRequest, parsed_chat_completion
from specgen.serve.formats.engine_requests import defaults_of, prompt_of
from specgen.serve.formats.fields import Fields, Integer, Json, parse
from specgen.serve.formats.model_adaptation import for_model
from specgen.serve.formats.openai_common import MAX_LOGPROBS, logprob_entry
from specgen.serve.formats.request_errors import BodyError, RequestError
from specgen.serve.server.jobs import ServedModel
from specgen.session.scoring import AnswerScorer, ScoredToken


class _Guess(Fields):
    """A token that was drafted, and perhaps rejected."""

    #: Its position in the answer, from 0.
    position: Annotated[int, Field(ge=0)]
    #: The token of the target's vocabulary.
    token: Integer


class _TokenProbabilitiesBody(ChatCompletionRequest):
    """The body of a chat request, with the answer to it."""

    #: The tokens of the answer.
    answer: Annotated[list[Integer], Field(min_length=1)]
    #: More tokens whose probabilities are wanted.
    guesses: list[_Guess] = Field(default_factory=list)
    #: The number of likeliest tokens at each position.
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 5


def token_probabilities(model: ServedModel, body: Json) -> Json:
    """Return the probabilities of the tokens of an answer, and of the likeliest ones.

    Raises:
        BodyError: If a field cannot be honoured.
        RequestError: If there is no memory for the contexts.
        SpecgenError: If the answer cannot be scored.
    """
    fields = parse(_TokenProbabilitiesBody, body)
    guesses: defaultdict[int, list[int]] = defaultdict(list)
    for index, guess in enumerate(fields.guesses):
        if guess.position >= len(fields.answer):
            raise BodyError(
                f"guesses[{index}].position",
                f"{guess.position} is not in the answer of {len(fields.answer)} tokens",
            )
        guesses[guess.position].append(guess.token)
    session = model.session
    request = for_model(parsed_chat_completion(fields, defaults_of(session)), session.target)
    prompt = prompt_of(request, session, model.engine.n_ctx)
    scorer = AnswerScorer(session, model.engine.n_ctx, fields.top_logprobs, model.decoding_turn)
    try:
        with model.scoring:
            scored = scorer.score(prompt, fields.answer, guesses)
    except MemoryLimitError as error:
        raise RequestError(503, error.message, "out_of_memory") from error
    return {
        "object": "token_probabilities",
        "model": model.name,
        "target": session.target.name,
        "draft": session.draft_name,
        "tokens": [_token_object(token) for token in scored],
    }


def _token_object(scored: ScoredToken) -> Json:
    """Return a token in OpenAI's form, with the likely tokens of both models."""
    return {
        **logprob_entry(scored.token),
        "top_logprobs": _entries(scored.target),
        "draft_top_logprobs": None if scored.draft is None else _entries(scored.draft),
    }


def _entries(tokens: Sequence[TokenLogprob]) -> list[Json]:
    return [logprob_entry(token) for token in tokens]
