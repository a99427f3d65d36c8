"""Chat templates that reject or drop the same messages as those of several model families."""

from __future__ import annotations

from tests.helpers.templates import FAMILIES
from tests.tiny.config import CHATML_TEMPLATE

_ALTERNATION = """\
{%- set ns = namespace(n=0) %}
{%- for m in turns if @counted %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- set ns.n = ns.n + 1 %}
{%- endfor %}
"""
_TURNS = """\
{%- for m in turns %}<|{{ m.role }}|>
{%- if m.tool_calls %}@calls{% else %}@text{% endif %}<|end|>
{% endfor %}<|assistant|>"""
_SPLIT = """\
{%- set system = '' %}{% set turns = messages %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- endif %}
"""
_NO_LATER_SYSTEM = """\
{%- for m in turns if m.role == 'system' %}
{{- raise_exception('only at the beginning') }}
{%- endfor %}
"""
_CALLS = (
    "{% for c in m.tool_calls %}"
    ">{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
_NO_CALLS = "m.role in ('user', 'assistant') and not m.tool_calls"


def _with_turns(
    before: str, *, counted: str = "", calls: str = _CALLS, text: str = "{{ m.content }}"
) -> str:
    """A template that writes the turns after its own beginning.

    Args:
        before: Sets `turns`, and checks them.
        counted: Which of the turns must alternate; empty for none.
        calls: How a turn with calls is written.
        text: How any other turn is written.
    """
    alternation = _ALTERNATION.replace("@counted", counted) if counted else ""
    return before + alternation + _TURNS.replace("@calls", calls).replace("@text", text)


#: By the family that each of them is like.
STRICT = {
    "ChatML": CHATML_TEMPLATE,
    "Hermes": FAMILIES["Hermes"],
    "Gemma 2": _with_turns(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% set turns = messages %}",
        counted="true",
        calls="{{ m.content }}",
    ),
    "Gemma 3": _with_turns(
        _SPLIT + "{{ system }}",
        counted="true",
        calls="{{ m.content }}",
        text="{{ m.content | trim }}",
    ),
    "Mistral": _with_turns(
        _SPLIT + _NO_LATER_SYSTEM + "{{ system }}",
        counted=_NO_CALLS,
        calls="[TOOL_CALLS]"
        "{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        "{{ c.function | tojson }}{% endfor %}",
        text="{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
        "{{ raise_exception('nine characters') }}{% endif %}{{ m.content }}",
    ),
    "Ministral": _with_turns(
        _SPLIT + _NO_LATER_SYSTEM + "{{ system }}",
        counted=_NO_CALLS,
        calls="{{ m.content }}" + _CALLS,
        text="{% if m.role == 'assistant' and not m.content %}"
        "{{ raise_exception('empty') }}{% endif %}{{ m.content }}",
    ),
    "Mistral Nemo": _with_turns(
        _SPLIT + _NO_LATER_SYSTEM,
        counted=_NO_CALLS,
        text="{% if loop.last and m.role == 'user' %}{{ system }}{% endif %}{{ m.content }}",
    ),
    "Qwen 3.5": _with_turns(
        _SPLIT + _NO_LATER_SYSTEM + "{{ system }}"
        "{% if not turns | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no user query') }}{% endif %}",
        calls="{{ m.content }}" + _CALLS,
    ),
    "gpt-oss": _with_turns(
        _SPLIT
        + "{{ system }}{% set turns = turns | rejectattr('role', 'equalto', 'system') | list %}"
        "{% set ns = namespace(called=false) %}{% for m in turns %}"
        "{% if m.tool_calls %}{% set ns.called = true %}"
        "{% if m.content and m.thinking %}{{ raise_exception('one of them') }}{% endif %}"
        "{% elif m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}"
        "{% elif m.role != 'tool' %}{% set ns.called = false %}{% endif %}{% endfor %}"
        "{% if false %}{{ message.thinking }}{% endif %}",
    ),
    "Llama 3": _with_turns(
        _SPLIT + "{{ system }}{% if tools %}{{ tools | tojson }}"
        "{{ turns[0].content | trim }}{% set turns = turns[1:] %}{% endif %}",
        calls="{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        + _CALLS,
    ),
    "Functionary": _with_turns(
        "{% set turns = messages %}",
        calls="{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}",
    ),
    "Phi 3.5": (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|assistant|>"
    ),
    "R1": (
        "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endfor %}{{ ns.system }}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if m.content is none %}{{ m.tool_calls | tojson }}"
        "{% else %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endif %}"
        "{% endfor %}<|assistant|>"
    ),
    "Nemotron": _with_turns(
        _SPLIT + "{{ system }}{% set last = turns[-1] %}"
        "{% if last.role == 'assistant' %}{% set turns = turns[:-1] %}{% endif %}",
        text="{% if m.role != 'system' %}{{ m.content }}{% endif %}",
    )
    + "{% if last.role == 'assistant' %}{{ last.content }}{% endif %}",
}
