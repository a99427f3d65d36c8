"""The prompt of a chat, written by the model's own template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.errors import PromptError

Role: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


class _GenerationBlocks(jinja2.ext.Extension):
    """Templates made for training mark the assistant's text with ``{% generation %}``; the
    mark changes nothing in what is written."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str,
    eos_token: str,
    now: datetime.datetime,
) -> str:
    """The conversation as the model expects it, ending where its answer begins.

    `template` is Jinja as Hugging Face's chat templates use it; it comes with the model file,
    from whoever made that, so it runs in a sandbox. Raises `PromptError` if the template does
    not accept the messages (some know no system message, for example) or is broken, whatever
    goes wrong in it. The sandbox bounds the length of a `range`, not the time that a template
    takes: one that loops for very long is not stopped.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    variables = {
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return environment.from_string(template).render(variables)
    # What a template's expressions raise can be anything, as can what compiling them raises.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(
            f"the model's chat template failed: {reason}",
            hint="leave out --system if it is the system message; `specgen run --raw` does without it",
        ) from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
