"""The endpoints that tokenize texts and render prompts, without generating anything."""

from __future__ import annotations

from pydantic import AliasChoices, Field

from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.engine_requests import Reader, parse_requests, prompt_of
from specgen.serve.formats.fields import Fields, Integer, Json, parse
from specgen.serve.formats.messages import read_messages
from specgen.serve.server.jobs import ServedModel
from specgen.session.prompts import Prompt


def count_message_tokens(model: ServedModel, body: Json) -> Json:
    """Return the number of tokens of a prompt, in Anthropic's form."""
    return {"input_tokens": _n_tokens(read_messages, model, body)}


def count_input_tokens(
    read: Reader,
    model: ServedModel,
    body: Json,
) -> Json:
    """Return the number of tokens of a prompt, in OpenAI's form; `read` reads the body."""
    return {
        "object": "response.input_tokens",
        "input_tokens": _n_tokens(read, model, body),
    }


def _n_tokens(read: Reader, model: ServedModel, body: Json) -> int:
    return len(_prompt(read, model, body).tokens)


def apply_template(model: ServedModel, body: Json) -> Json:
    """Return the prompt that the chat template makes from messages."""
    return {"prompt": _prompt(read_chat, model, body).text}


def _prompt(read: Reader, model: ServedModel, body: Json) -> Prompt:
    """Render the prompt in a body, even if it is too long for the context."""
    (request,) = parse_requests(read, model.session, body)
    return prompt_of(request, model.session, model.engine.n_ctx, must_fit=False)


class _TokenizeBody(Fields):
    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(
        False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    #: Whether each token comes with its text, or with its bytes if they are not UTF-8.
    with_pieces: bool = False


def tokenize(model: ServedModel, body: Json) -> Json:
    """Return the tokens of a text, with the text or the bytes of each if wanted.

    The text of a control token is its name, as in llama.cpp's server.
    """
    request = parse(_TokenizeBody, body)
    vocabulary = model.target.vocabulary
    tokens = vocabulary.tokenize(
        request.content,
        add_special=request.add_special,
        parse_special=request.parse_special,
    )
    if not request.with_pieces:
        return {"tokens": list(tokens)}
    pieces = [{"id": token, "piece": _piece(vocabulary.shown_bytes(token))} for token in tokens]
    return {"tokens": pieces}


def _piece(data: bytes) -> str | list[int]:
    """Return bytes as text, or as a list of numbers if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class _DetokenizeBody(Fields):
    tokens: list[Integer]


def detokenize(model: ServedModel, body: Json) -> Json:
    """Return the text of tokens, in the fields of llama.cpp's server and of vLLM's.

    Both write the names of control tokens.
    """
    tokens = parse(_DetokenizeBody, body).tokens
    vocabulary = model.target.vocabulary
    vocabulary.check(tokens)
    text = b"".join(map(vocabulary.shown_bytes, tokens)).decode(errors="replace")
    return {"content": text, "prompt": text}
