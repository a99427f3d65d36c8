"""The arguments of llama-cpp-python's completions, as bodies of OpenAI's requests."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from specgen.drop_in.grammar import grammar_fields
from specgen.errors import UsageError, did_you_mean
from specgen.option_values import shown_value
from specgen.serve.formats.fields import Fields, Json


class AnyCompletionArguments(TypedDict, total=False):
    """What texts and chats have in common. An argument that is None counts as left out.

    The other fields of `specgen serve`'s requests are accepted, too, such as ``dry_multiplier``,
    ``xtc_probability`` and ``json_schema``.
    """

    #: The temperature of sampling; 0 chooses the most likely token each time.
    temperature: float | None
    #: Keep only the most likely tokens whose probabilities add up to this.
    top_p: float | None
    #: Keep only this many of the most likely tokens; 0 keeps all.
    top_k: int | None
    #: Drop tokens that are less than this times as likely as the most likely one.
    min_p: float | None
    #: Keep only the most typical tokens whose probabilities add up to this.
    typical_p: float | None
    #: Whether chunks are returned as they are generated.
    stream: bool | None
    #: A text, or several, before which the answer ends.
    stop: str | Sequence[str] | None
    #: The seed of sampling: the same seed gives the same text.
    seed: int | None
    #: Subtract this from the logits of tokens that have already occurred.
    presence_penalty: float | None
    #: Subtract this from a token's logit for each time that it has occurred.
    frequency_penalty: float | None
    #: Divide the logits of tokens that have already occurred by this.
    repeat_penalty: float | None
    #: The name of the model in the result.
    model: str | None
    #: A `LlamaGrammar`, or GBNF, that the answer follows.
    grammar: Any
    #: Biases of tokens, by their ids.
    logit_bias: Mapping[int, float] | None
    #: How much is drafted, as in `specgen serve`'s requests.
    speculative: Mapping[str, Any] | None
    #: Ignored, as by llama-cpp-python.
    tfs_z: float | None
    #: Refused unless it is 0.
    mirostat_mode: int | None
    #: Ignored.
    mirostat_tau: float | None
    #: Ignored.
    mirostat_eta: float | None
    #: Refused.
    logits_processor: Any


class CompletionArguments(AnyCompletionArguments, total=False):
    """The arguments of a text completion after the prompt, its suffix and its length."""

    #: The number of likely tokens whose log-probabilities are reported.
    logprobs: int | None
    #: Whether the text begins with the prompt.
    echo: bool | None
    #: Refused.
    stopping_criteria: Any


class ChatArguments(AnyCompletionArguments, total=False):
    """The arguments of a chat completion after the messages."""

    #: The functions that the model may call, in OpenAI's older form.
    functions: Sequence[Mapping[str, Any]] | None
    #: Which of them it must call.
    function_call: str | Mapping[str, Any] | None
    #: The tools that the model may call.
    tools: Sequence[Mapping[str, Any]] | None
    #: Which of them it must call.
    tool_choice: str | Mapping[str, Any] | None
    #: The form of the answer: text, JSON, or JSON of a schema.
    response_format: Mapping[str, Any] | None
    #: The maximum number of tokens; None or 0 for no limit but the context.
    max_tokens: int | None
    #: Whether log-probabilities are reported.
    logprobs: bool | None
    #: The number of likely tokens whose log-probabilities are reported.
    top_logprobs: int | None


#: llama-cpp-python's defaults.
_DEFAULTS: Json = {
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.0,
}
TEXT_DEFAULTS: Json = {**_DEFAULTS, "temperature": 0.8}
CHAT_DEFAULTS: Json = {**_DEFAULTS, "temperature": 0.2}
#: Arguments without meaning here, with the values that need no warning; None for any value.
_IGNORED: Mapping[str, float | None] = {"mirostat_eta": None, "mirostat_tau": None, "tfs_z": 1.0}
#: Arguments that cannot be honoured, and why.
_REFUSED: Mapping[str, str] = {
    "logits_processor": "drafts are verified without calling Python for each token",
    "mirostat_mode": "Mirostat's state is not known to drafts",
    "stopping_criteria": "the logits are not passed to Python; use stop",
}


def body_of(
    fields: type[Fields],
    defaults: Json,
    arguments: Mapping[str, Any],
    *,
    next_seed: int | None,
) -> Json:
    """Return the body of the request that has the meaning of a call's arguments.

    Args:
        fields: The fields of the request.
        defaults: The values of arguments that are left out.
        arguments: The arguments.
        next_seed: The seed of an answer without its own; None for a random one.

    Raises:
        UsageError: If an argument is unknown or cannot be honoured.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_names(fields, given)
    body = defaults | {
        name: value
        for name, value in given.items()
        if name not in {*_IGNORED, *_REFUSED, "grammar"}
    }
    if "grammar" in given:
        body |= grammar_fields(given["grammar"])
    if next_seed is not None:
        body.setdefault("seed", next_seed)
    # llama-cpp-python has no limit unless the number is positive.
    n_tokens = body.get("max_tokens")
    if n_tokens is None or (isinstance(n_tokens, int) and n_tokens <= 0):
        body["max_tokens"] = -1
    if isinstance(body.get("logit_bias"), Mapping):
        body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
    return body


def _check_names(fields: type[Fields], given: Mapping[str, Any]) -> None:
    """Check the names of a call's arguments, and warn about one that is ignored.

    Raises:
        UsageError: If one is unknown or cannot be honoured.
    """
    known_names = {*fields.names(), *_IGNORED, *_REFUSED, "model"}
    for name, value in given.items():
        if name not in known_names:
            raise UsageError(
                f"there is no argument {name!r}{did_you_mean(name, sorted(known_names))}"
            )
        if name in _REFUSED and value != 0:
            raise UsageError(
                f"{name}: specgen's Llama does not have it, because {_REFUSED[name]}",
                "leave it out, or use llama_cpp.Llama",
            )
        if _IGNORED.get(name) not in (None, value):
            message = f"specgen's Llama ignores {name}={shown_value(value)}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
