"""Thinking blocks, which some models write between marks before their answer."""

from __future__ import annotations

import re
from dataclasses import replace

from specgen.text.grammar.free_text import ThoughtMarks

#: By what an answer begins with, or a prompt ends with.
FAMILIES = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThoughtMarks("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ThoughtMarks("<thinking>", "</thinking>"),  # Apriel
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        ("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),  # Command
    ThoughtMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>",),
        ("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),  # Kimi K3
    ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        (
            "<|start|>assistant<|channel|>final<|message|>",
            "<|channel|>final<|message|>",
            "<|start|>assistant",
        ),
        final="<|channel|>final<|message|>",
    ),  # gpt-oss
)
#: Names of control tokens among the marks: a reader sees them only if the text shows them.
THOUGHT_CONTROLS = tuple(
    dict.fromkeys(
        name
        for family in FAMILIES
        for text in (family.begin, family.end, *family.around)
        for name in re.findall(r"<[^<>]+>|\[/?[A-Z]+\]", text)
    )
)


def writes_thoughts(template: str) -> bool:
    """Return whether a chat template has the marks of thoughts."""
    return any(family.begin in template for family in FAMILIES)


def begun_in(prompt: str) -> ThoughtMarks | None:
    """Return the marks of the thinking block that a template has opened at the end of a prompt."""
    end = prompt.rstrip()
    return next((family for family in FAMILIES if end.endswith(family.begin)), None)


def thoughts_behind(prompt: str, template: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that an answer to a prompt may have; None if the template knows of none."""
    if (begun := begun_in(prompt)) is not None:
        return replace(begun, state="open")
    end = prompt.rstrip()
    over = next((family for family in FAMILIES if end.endswith(family.end)), None)
    if over is not None:
        return replace(over, state="over")
    return next((family for family in FAMILIES if family.begin in template), None)


def mark_before_answer(prompt: str) -> str:
    """Return what a model of gpt-oss's family writes between a prompt and the text of its answer."""
    is_harmony = prompt.endswith("<|start|>assistant")
    return "<|channel|>final<|message|>" if is_harmony else ""
