"""Prompt files for `specgen bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgen.errors import PromptError
from specgen.measure.prompts import BenchPrompt, evenly_chosen, first_of_each, read_bench_prompts


def test_json_lines_have_a_prompt_or_turns_and_may_have_a_category(tmp_path: Path) -> None:
    records = [
        {"prompt": "one", "category": "a"},
        {"turns": ["two", "never read"], "category": "code\tedit"},
        {"prompt": "line\u2028separator"},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    for name in ("prompts.jsonl", "prompts", "prompts.txt.jsonl"):
        file = tmp_path / name
        file.write_text("\ufeff" + "\n\n".join(lines) + "\r\n", encoding="utf-8")
        assert read_bench_prompts(file) == [
            BenchPrompt(1, "a", "one"),
            BenchPrompt(2, "code edit", "two"),
            BenchPrompt(3, "all", "line\u2028separator"),
        ]


def test_in_any_other_file_each_line_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('Write a poem.\n\n  {"not": "JSON here"}  \n', encoding="utf-8")
    assert read_bench_prompts(file) == [
        BenchPrompt(1, "all", "Write a poem."),
        BenchPrompt(2, "all", '{"not": "JSON here"}'),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not JSON", "not JSON: Expecting value at column 1"),
        ("[1]", "not a JSON object"),
        ("{}", "no prompt"),
        ('{"prompt": ""}', "no prompt"),
        ('{"turns": [7]}', "no prompt"),
        ('{"prompt": "x", "category": 7}', "category"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(PromptError, match=f"line 3: .*{what}") as raised:
        read_bench_prompts(file)
    assert "\n" not in raised.value.message


def test_files_that_cannot_be_read_or_are_empty_are_errors(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("\n \n", encoding="utf-8")
    binary.write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match="no prompts"):
        read_bench_prompts(empty)
    with pytest.raises(PromptError, match="not UTF-8"):
        read_bench_prompts(binary)
    with pytest.raises(PromptError, match="cannot be read"):
        read_bench_prompts(tmp_path / "missing.jsonl")


def test_the_first_prompts_of_each_category_are_taken_or_some_spread_evenly() -> None:
    prompts = [BenchPrompt(n, category, str(n)) for n, category in enumerate("abbabc", 1)]
    assert [prompt.number for prompt in first_of_each(prompts, 2)] == [1, 2, 3, 4, 6]
    assert first_of_each(prompts, 9) == prompts
    assert evenly_chosen("abcdef", 3) == ["a", "c", "e"]
    assert evenly_chosen("ab", 5) == ["a", "b"]
