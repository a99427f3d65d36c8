"""Chat templates that write tool calls in the form of several model families."""

from __future__ import annotations

from typing import Any

from specgen.session.prompts.template import Message, ToolCall, render
from tests.helpers.common import NOW

_TURNS = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_VALUE = "{{ v if v is string else v | tojson }}"


def _calls(one: str, opening: str = "", between: str = "", closing: str = "") -> str:
    """A template; `one` is a call `c` of `m.tool_calls`."""
    others = "{% if not loop.first %}" + between + "{% endif %}"
    loop = "{% for c in m.tool_calls %}" + others + one + "{% endfor %}"
    return _TURNS.replace("CALLS", opening + loop + closing)


def _each(pair: str) -> str:
    return "{% for k, v in c.function.arguments.items() %}" + pair + "{% endfor %}"


_OBJECT = '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}"
_GEMMA_VALUE = """\
{%- macro w(v) %}
{%- if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}\
{{ ',' if not loop.first }}{{ k }}:{{ w(x) }}{% endfor %}{{ '}' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}{% elif v is iterable %}[{% for x in v %}\
{{ ',' if not loop.first }}{{ w(x) }}{% endfor %}]{% else %}{{ v }}{% endif %}
{%- endmacro %}
"""
_NESTED_VALUE = """\
{%- macro w(v) %}
{%- if v is mapping %}{% for k, x in v.items() %}\
]<]mm[>[<{{ k }}>{{ w(x) }}]<]mm[>[</{{ k }}>{% endfor %}
{%- elif v is iterable and v is not string %}{% for x in v %}\
]<]mm[>[<item>{{ w(x) }}]<]mm[>[</item>{% endfor %}
{%- else %}{{ v if v is string else v | tojson }}{% endif %}
{%- endmacro %}
"""
FAMILIES = {
    "Hermes": _calls(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),
    "Llama": _calls(
        '{% if m.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}'
        + _OBJECT.replace('"arguments"', '"parameters"')
    ),
    "Mistral": _calls(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    "Granite": _calls(_OBJECT, "<|tool_call|>[", ", ", "]"),
    "Devstral": _calls(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}"),
    "Kimi": _calls(
        f"<|one|>functions.{_NAME}:" + "{{ loop.index0 }}" + f"<|args|>{_ARGUMENTS}<|/one|>",
        "<|section|>",
        closing="<|/section|>",
    ),
    "Command": _calls(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
        + _NAME
        + f'", "parameters": {_ARGUMENTS}}}',
        "<|START_ACTION|>[\n    ",
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "Apertus": _calls('{"' + _NAME + f'": {_ARGUMENTS}}}', "<|tools|>[", ", ", "]<|/tools|>"),
    "Qwen-Coder": _calls(
        f"<tool_call>\n<function={_NAME}>\n"
        + _each("<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>",
        between="\n",
    ),
    "GLM": _calls(
        f"<tool_call>{_NAME}"
        + _each("<arg_key>{{ k }}</arg_key><arg_value>" + _VALUE + "</arg_value>")
        + "</tool_call>"
    ),
    "MiniMax": _calls(
        f'<invoke name="{_NAME}">\n'
        + _each('<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
        + "</invoke>\n",
        "<calls>\n",
        closing="</calls>",
    ),
    "DeepSeek": _calls(
        f'<call name="{_NAME}">\n'
        + _each('<arg name="{{ k }}" string="{{ (v is string) | tojson }}">' + _VALUE + "</arg>\n")
        + "</call>",
        "<calls>\n",
        "\n",
        "\n</calls>",
    ),
    "R1": _calls(f"<one>{_NAME}\n```json\n{_ARGUMENTS}\n```</one>", "<calls>", "\n", "</calls>"),
    "LFM": _calls(
        _NAME
        + "("
        + _each(
            '{{ ", " if not loop.first else "" }}{{ k }}='
            "{{ v | tojson if v is string or v is mapping else v }}"
        )
        + ")",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
    ),
    "Gemma": _calls(
        f"<|call>call:{_NAME}"
        "{{ '{' }}"
        "{% for k, v in c.function.arguments | dictsort %}"
        "{{ ',' if not loop.first }}{{ k }}:{{ w(v) }}{% endfor %}"
        "{{ '}' }}<call|>"
    ).replace("{%- if tools", _GEMMA_VALUE + "{%- if tools", 1),
    "MiniMax-3": _calls(
        f']<]mm[>[<invoke name="{_NAME}">{{{{ w(c.function.arguments) }}}}]<]mm[>[</invoke>\n',
        "]<]mm[>[<tool_call>\n",
        closing="]<]mm[>[</tool_call>",
    ).replace("{%- if tools", _NESTED_VALUE + "{%- if tools", 1),
}
FAMILIES["Gemma-3"] = FAMILIES["Gemma"].replace('<|"|>', "<escape>")
#: The marks of their calls that are control tokens.
CONTROLS: dict[str, tuple[str, ...]] = {
    "Hermes": ("<tool_call>", "</tool_call>"),
    "Llama": ("<|python_tag|>",),
    "Mistral": ("[TOOL_CALLS]",),
    "Granite": ("<|tool_call|>",),
    "Devstral": ("[TOOL_CALLS]", "[ARGS]"),
    "MiniMax-3": ("]<]mm[>[",),
    "Kimi": ("<|section|>", "<|one|>", "<|args|>", "<|/one|>", "<|/section|>"),
}
#: Takes tools, and writes calls in a way of its own.
UNKNOWN = _calls("{{ c.function.name | upper }}!")


def calls_as_written(template: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls, each a name and arguments, as a model with a template writes them."""
    made = tuple(ToolCall(f"id{name}", name, arguments) for name, arguments in calls)
    turns = [Message("user", "x"), Message("assistant", "", made)]
    text = render(template, turns, bos_token="", eos_token="", now=NOW)
    return text.partition("assistant\n")[2].partition("<|im_end|>")[0]


def made_of(marks: dict[str, str], kind: str) -> str:
    """A template whose calls have these marks: objects of JSON, a name before JSON, or a name
    before pairs.
    """
    opening, between, closing, before, after, last = (
        "{{ " + repr(marks[each]) + " }}"
        for each in ("opening", "between", "closing", "before", "after", "last")
    )
    pair = "{{ " + repr(f"<{marks['opening']}p=") + " }}{{ k }}>" + _VALUE + "</p>"
    one = {
        "object": _OBJECT,
        "json": _NAME + after + _ARGUMENTS,
        "pairs": _NAME + after + _each(pair),
    }
    return _calls(before + one[kind] + last, opening, between, closing)
