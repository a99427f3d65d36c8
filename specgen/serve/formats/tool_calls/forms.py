"""The forms in which model families write tool calls.

Most models need nothing here: `form_probe` finds their form by rendering their chat template. To
add a family whose template offers tools but never shows a call, declare its `CallForm` below and
enter it in `FORMS_BY_MARK`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from specgen.serve.formats.tool_calls.values import Style
from specgen.text.grammar.free_text import ANY

#: How arguments are written: as one value in a `Style`, or as pairs of key and value in tags.
ArgumentsStyle: TypeAlias = Literal[Style, "pairs"]

#: Matches the first tag or word of a text: `<tag>`, `[TAG]` or MiniMax's `]<]mm[>[<tag>`. Of a tag
#: with attributes, it matches the name.
_MARK = re.compile(r"\]<\]\S+?\[>\[<[^<>\s]*>|\[[A-Z_]+\]|<[^<>\s]*>|<[^<>\s]+|[^\s{\[]+")
#: Matches a mark whose name shows that nothing but calls follows it, such as `<tool_call>`.
_MARK_OF_CALLS_ONLY = re.compile(r"(?i)(?:tool|call|func|action).*[>\]=]$")
#: Matches the id of a call and the tag before it, as in Mistral's `[CALL_ID]abc`.
_MARKED_ID = re.compile(rf"\[[A-Z_]+\]{ANY}")
#: Matches a text in the form of a control token.
_CONTROL_TOKEN = re.compile(r"\]<\][^<>\s]+\[>\[|<[^<>\s]+>|\[/?[A-Z_]+\]")
#: Llama's own mark of a call, which its template does not write.
PYTHON_TAG: Final = "<|python_tag|>"
#: Qwen2.5-Coder's chat template puts this tag before the descriptions of tools, and the model may
#: copy it before its calls.
TOOLS_TAG: Final = "<tools>"
#: What may open the fence around a call that is a bare JSON object, as a regular expression.
OPENING_FENCE: Final = rf"(?:```(?:json)?|{TOOLS_TAG})"


@dataclass(frozen=True, slots=True)
class ArgumentPair:
    """How one argument is written if arguments are pairs of key and value."""

    #: The text before the key.
    opening: str
    #: The text between key and value, by the JSON type of the value.
    middles: Mapping[str, str]
    #: The text after the value, with `ANY` in place of the key. If it repeats the key, the model
    #: also writes lists and objects as tags within tags.
    closing: str

    def closing_of(self, key: str) -> str:
        """Return the text after the value of this key."""
        return self.closing.replace(ANY, key)

    @property
    def tag_prefix(self) -> str:
        """The beginning of each tag if lists and objects are tags, too; empty if they are JSON."""
        if ANY not in self.closing:
            return ""
        return self.opening.lstrip()


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of an answer's calls: `opening`, name, `after_name`, arguments, `closing`.

    `ANY` in these texts stands for what differs from call to call: an id or a number.
    """

    #: The text before the name of the first call.
    opening: str
    #: The text between a name and its arguments.
    after_name: str
    #: The text after the last arguments.
    closing: str
    #: The text between two calls, in place of `closing` and `opening`; None if the template takes
    #: only one call.
    between: str | None = None
    #: How arguments are written.
    style: ArgumentsStyle = "json"
    #: How one argument is written, with the style ``pairs``.
    pair: ArgumentPair | None = None
    #: What begins and ends a text, with the style ``gemma``.
    quote: str = '<|"|>'
    #: Other texts that models write instead of `after_name`.
    other_after_names: tuple[str, ...] = ()
    #: The keys of the name and of the arguments, if a call is a JSON object. Both are empty if the
    #: name itself is the key of the arguments. None if a call is not an object.
    keys: tuple[str, str] | None = None

    @property
    def mark(self) -> str:
        """The first tag or word of `opening`; empty if a call is a bare JSON object."""
        mark = _MARK.match(self.opening.strip())
        if mark is None:
            return ""
        return mark[0]

    @property
    def inner_mark(self) -> str:
        """The tag after `mark` in `opening`, for models that omit `mark`; empty if none."""
        rest = self.opening.strip()[len(self.mark) :].lstrip()
        if not rest.startswith(("<", "]<]")):
            return ""
        return rest

    @property
    def trigger(self) -> str:
        """The text that distinguishes the beginning of a call from content.

        It is `mark` if that clearly means a call, and otherwise `opening`, up to an `ANY`.
        """
        if _MARK_OF_CALLS_ONLY.search(self.mark):
            return self.mark
        return self.opening.strip().partition(ANY)[0]

    @property
    def continues_after_closing(self) -> bool:
        """Whether another call may follow `closing` without a `mark`."""
        between = self.between or ""
        return between.startswith(self.closing.rstrip()) and self.mark not in between

    @property
    def after_names(self) -> tuple[str, ...]:
        """The texts that may follow a name; some models omit the id that their template writes."""
        without_id = _MARKED_ID.sub("", self.after_name)
        return tuple(dict.fromkeys((self.after_name, without_id, *self.other_after_names)))

    @property
    def separator(self) -> str:
        """The text from one call's arguments to the next call's name.

        If calls are JSON objects, it is the text from one object to the next. It is empty if the
        template takes only one call, and a space if calls follow one another directly.
        """
        if self.between is None:
            return ""
        between = self.between or " "
        if self.keys is None:
            return between
        # `between` also has the end of one object and the beginning of the next.
        after_object = between.partition("}")[2]
        if "{" not in after_object:
            return ""
        return after_object[: after_object.rfind("{")] or " "

    @property
    def terminator(self) -> str:
        """The text after the last call's arguments, or after its JSON object."""
        closing = self.closing.rstrip()
        if self.keys is None:
            return closing
        return closing.partition("}")[2]

    @property
    def argument_beginnings(self) -> list[str]:
        """The texts that arguments may begin with, including those that end a call without any."""
        if self.pair is not None:
            return [self.pair.opening, *self.argument_ends]
        if self.style == "python":
            return ["("]
        return ["{"]

    @property
    def argument_ends(self) -> list[str]:
        """The texts that may follow the arguments of a call."""
        ends = [self.between or "", self.closing]
        if self.style == "pairs":  # some models write only the last mark of `closing`
            ends += _CONTROL_TOKEN.findall(self.closing)[-1:]
        return [end for end in ends if end]

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The parts of a call that may be control tokens, which answers do not show by default."""
        texts = [
            self.opening,
            self.after_name,
            self.closing,
            self.between or "",
            self.quote,
        ]
        if self.pair is not None:
            texts.append(self.pair.opening)
            texts += self.pair.middles.values()
            texts.append(self.pair.closing)
        if not self.mark:
            texts.append(PYTHON_TAG)
        tokens: list[str] = []
        for text in texts:
            tokens += _CONTROL_TOKEN.findall(text)
        return tuple(dict.fromkeys(tokens))


# --- forms that templates do not show -------------------------------------------------------------

#: gpt-oss: ``to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``. It writes the channel
#: before the name of the function or, like its template, after it.
HARMONY = CallForm(
    opening="to=functions.",
    after_name=" <|constrain|>json<|message|>",
    closing="<|call|>",
    other_after_names=tuple(
        f"{channel}{kind}<|message|>"
        for channel in ("", f"<|channel|>{ANY}")
        for kind in (" <|constrain|>json", " json", "")
    ),
)

#: LFM2: ``<|tool_call_start|>[NAME(key='value'), NAME(...)]<|tool_call_end|>``
LFM2 = CallForm(
    opening="<|tool_call_start|>[",
    after_name="",
    closing="]<|tool_call_end|>",
    between=", ",
    style="python",
)

#: Granite 3: ``<|tool_call|>[{"name": NAME, "arguments": {...}}, {...}]``
GRANITE = CallForm(
    opening='<|tool_call|>[{"name": "',
    after_name='", "arguments": ',
    closing="}]",
    between='}, {"name": "',
    keys=("name", "arguments"),
)

#: Hermes and Qwen: a JSON object in ``<tool_call>`` for each call.
HERMES = CallForm(
    opening='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    closing="}\n</tool_call>",
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    keys=("name", "arguments"),
)

#: The forms of models with templates that offer tools but never write a call. The keys show the
#: form: a control token of the model, or a part of the template's instructions.
FORMS_BY_MARK: Mapping[str, CallForm] = {
    "<|tool_call_start|>": LFM2,
    "<|tool_call|>": GRANITE,
    "<tool_call>": HERMES,
}
