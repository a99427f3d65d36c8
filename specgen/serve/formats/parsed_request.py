"""A request of any API, in specgen's own terms."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from specgen.options import GenerationOptions, SamplerOptions, VerifierName
from specgen.serve.formats.fields import Fields
from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tools import RequestTools
from specgen.session.prompts import Prompt, Prompts
from specgen.session.prompts.infill import Gap
from specgen.session.prompts.template import Message

#: ``chat`` continues a conversation, ``completion`` a text, and ``prompt`` answers a text as
#: `specgen run` does.
RequestKind: TypeAlias = Literal["chat", "completion", "prompt"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of the fields that a body leaves out."""

    sampling: SamplerOptions = SamplerOptions()
    generation: GenerationOptions = GenerationOptions()


NO_DEFAULTS = Defaults()


class SpeculativeSettings(Fields):
    """How a request sets speculative decoding; None keeps the server's setting."""

    #: Whether to draft at all.
    draft: bool = True
    #: The maximum number of tokens of a draft.
    max: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    verifier: VerifierName | None = None
    #: Whether a stream has the events of each round.
    events: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The prompt of an answer, how its tokens are sampled, and when it ends.

    The prompt is `messages` in a ``chat``, and otherwise exactly one of `text`, `tokens` and `gap`.
    """

    kind: RequestKind
    sampling: SamplerOptions
    generation: GenerationOptions
    #: Makes the `AnswerWriter` of the API.
    writer: Callable[..., Any]
    messages: tuple[Message, ...] = ()
    #: Whether the last message is the beginning of the answer.
    continues: bool = False
    #: Whether the oldest turns are left out if the conversation does not fit into the context.
    leaves_out_turns: bool = False
    text: str = ""
    #: Tokens that come before the prompt: those of an earlier request and its answer.
    earlier_tokens: tuple[int, ...] = ()
    #: Whether a chat needs a chat template. Otherwise a model without one gets the texts alone.
    needs_template: bool = True
    #: The tokens of the prompt, with texts among them.
    tokens: tuple[int | str, ...] | None = None
    #: The gap in a text that the answer fills.
    gap: Gap | None = None
    #: The functions that the model may call; None if it may not call any.
    tools: RequestTools | None = None
    #: How the model writes calls, which `model_adaptation` finds out; None if that is unknown.
    call_form: CallForm | None = None
    #: More variables for the chat template.
    variables: Mapping[str, Any] = field(default_factory=dict)
    #: Biases of tokens, or of all tokens of a text. `model_adaptation` turns them into an option of
    #: the sampler.
    biases: tuple[tuple[int | str, float], ...] | None = None
    #: Whether a thinking block is kept out of the answer's content.
    splits_reasoning: bool = False
    #: The fields that were ignored, and why.
    warnings: tuple[str, ...] = ()
    #: The number of answers to generate.
    n: int = 1
    #: Whether the answer is streamed.
    streams: bool = False
    #: Whether the answer's text begins with the prompt.
    echoes: bool = False
    #: Whether the last chunk of a stream has the usage and nothing else.
    has_usage_chunk: bool = False
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)
    #: The time after which an answer ends as soon as it has a line break; 0 for no limit.
    time_limit_s: float = 0.0

    def prompt(
        self,
        prompts: Prompts,
        now: datetime.datetime,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Prompt:
        """Render the prompt of a request without a gap.

        Args:
            prompts: Makes prompts for the models of a session.
            now: The time, for chat templates.
            chat: Whether a ``prompt`` is rendered as a user's turn; None for whether the model has
                a chat template.
            system: The system message of a ``prompt``.

        Raises:
            UsageError: If the model has no chat template and needs one.
            PromptError: If the prompt is empty, too long, or not valid.
        """
        if self.kind == "chat":
            prompt = self._chat_prompt(prompts, now)
            if self.earlier_tokens:
                prompt = prompts.after(self.earlier_tokens, prompt)
            return prompt
        if self.tokens is not None:
            return prompts.of_tokens(self.tokens)
        if self.kind == "completion":
            return prompts.of_text(self.text, chat=False)
        return prompts.of_text(self.text, chat=chat, system=system, now=now)

    def _chat_prompt(
        self,
        prompts: Prompts,
        now: datetime.datetime,
    ) -> Prompt:
        """Render the prompt of a chat, perhaps with the beginning of the answer."""
        if not self.needs_template and prompts.target.chat_template() is None:
            text = "\n\n".join(message.content for message in self.messages)
            return prompts.of_text(text, chat=False)
        tools: list[dict[str, Any]] = []
        if self.tools is not None:
            tools += (function.definition for function in self.tools.functions)
        # The beginning of an answer is written after the template, without an end of turn.
        messages = self.messages
        continues = self.continues and not self._is_bound_by_grammar
        if continues:
            messages = messages[:-1]
        prompt = prompts.of_messages(messages, now=now, tools=tools, variables=self.variables)
        if not self.splits_reasoning:
            prompt = replace(prompt, thoughts=None)
        if continues:
            return prompts.continued(prompt, self.messages[-1])
        return prompt

    @property
    def _is_bound_by_grammar(self) -> bool:
        """Whether a grammar applies from the beginning, so that no partial answer may precede."""
        grammar = self.generation.grammar
        return grammar is not None and (not grammar.mark or grammar.is_call)


#: A request for each prompt of a body.
ParsedRequests: TypeAlias = tuple[ParsedRequest, ...]
