"""Templates of strangers do what templates need, and no more."""

from __future__ import annotations

import pytest

from specgen.errors import PromptError
from specgen.session.prompts.template import Message, render
from tests.helpers.common import NOW

_DOUBLED = (
    "{%% set n = namespace(a='x') %%}{%% for _ in range(99) %%}{%% set n.a = %s %%}{%% endfor %%}"
)


def rendered(template: str) -> str:
    messages = [Message("user", "x"), Message("assistant", "y")]
    return render(template, messages, bos_token="", eos_token="", now=NOW)


_ENDLESS = {
    "division by zero": ("{{ 1 / 0 }}",),
    "recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ),
    "Range too big": ("{% for i in range(10**9) %}x{% endfor %}",),
    "steps": (
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ),
    "more than": (
        "{% for i in range(300) %}{{ 'x' * 10**5 }}{% endfor %}",
        *(
            "{{ 'x' * 10**10 }}",
            "{{ 10**10 * [1] }}",
            _DOUBLED % "n.a ~ n.a",
            _DOUBLED % "n.a + n.a",
        ),
        *("{{ 'x'.ljust(10**10) }}", "{{ 'x'.zfill(10**10) }}", "{{ 'x' | center(10**10) }}"),
        *("{{ 'x' | indent(10**10) }}", "{{ ('\\t' * 10**5).expandtabs(10**6) }}"),
        "{{ ('x' * 10**5).replace('x', 'y' * 10**5) }}",
        "{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}",
        *("{{ ('x' * 10**6).join(['a'] * 10**4) }}", "{{ (['a'] * 10**4) | join('x' * 10**6) }}"),
    ),
    "digits": ("{{ 2 ** (10 ** 8) }}", "{{ 2 ** 1000 ** 1000 }}"),
    "widths": (
        *("{{ '%10000000000d' % 1 }}", "{{ '%*d' | format(10**10, 1) }}"),
        *("{{ '{:>9999999999}'.format('a') }}", "{{ '{:>{w}}'.format('a', w=10**10) }}"),
    ),
    "unsafe": ("{{ ''.__class__.__mro__ }}",),
}


@pytest.mark.parametrize(
    ("template", "why"), [(template, why) for why, each in _ENDLESS.items() for template in each]
)
def test_a_template_without_end_is_one_line(template: str, why: str) -> None:
    with pytest.raises(PromptError, match=why) as caught:
        rendered(template)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{% set x %}a{% endset %}{{ x ~ 'b' }}", "ab"),
        ("{{ ['a', 'b'] + ['c'] }}", "['a', 'b', 'c']"),
        ("{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 1 + 2 }}", "abab10243"),
        ("{{ messages | join(', ', attribute='role') }}", "user, assistant"),
        ("{{ messages | map(attribute='content') | join('|') }}", "x|y"),
        ("{{ ['a'] | join }}{{ ', '.join(['a', 'b']) }}", "aa, b"),
        ("{% set d = {'x': ['a']} %}{{ d.get('x').append('b') }}{{ d.x | join }}", "Noneab"),
        ("{{ 'abc' | replace('b', 'xx') }}{{ 'abc'.replace('b', '') }}", "axxcac"),
        ("{{ '%s and %5d' % ('a', 3) }}{{ '%s' | format('a') }}", "a and     3a"),
        ("{{ '{} {:>3}'.format('a', 'b') }}", "a   b"),
        ("{{ 'a\nb' | indent(4) }}{{ 'x'.rjust(3) }}", "a\n    b  x"),
        (
            "{% for m in messages %}{% if loop.last %}{{ m.content | trim }}{% endif %}{% endfor %}",
            "y",
        ),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ],
)
def test_what_templates_do(template: str, text: str) -> None:
    assert rendered(template) == text


def test_turns_of_one_role_are_joined_for_templates_that_refuse_them() -> None:
    turns = [Message("user", "a"), Message("user", "b")]
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    strict = "{% if messages | length == 2 %}{{ raise_exception('alternate') }}{% endif %}" + plain
    texts = [render(each, turns, bos_token="", eos_token="", now=NOW) for each in (plain, strict)]
    assert texts == ["[a][b]", "[a\n\nb]"]
