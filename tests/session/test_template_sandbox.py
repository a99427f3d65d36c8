"""Templates from untrusted files can do what templates need, and no more."""

from __future__ import annotations

import pytest

from specgen.errors import PromptError
from specgen.session.prompts.template import Message, render
from tests.helpers.common import NOW


def rendered(template: str) -> str:
    messages = [Message("user", "x"), Message("assistant", "y")]
    return render(template, messages, bos_token="", eos_token="", now=NOW)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "recursion"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_one_line(template: str, why: str) -> None:
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
            (
                "{% for m in messages %}{% if loop.last %}{{ m.content | trim }}{% endif %}"
                "{% endfor %}"
            ),
            "y",
        ),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ],
)
def test_features_that_templates_use(template: str, text: str) -> None:
    assert rendered(template) == text
