"""Phrases that language models have in common, for n-grams to search from the first answer on.

Most models were trained on similar conversations, and begin, connect and format answers alike ("I
hope this message finds you well"). `common_phrases.json` has such phrases as texts, so that any
vocabulary can tokenize them. They are what answers of Qwen2.5-Coder 0.5B and 1.5B (Apache-2.0) to
different prompts share (`scripts/make_common_phrases.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from specgen.text.vocabulary import Vocabulary

_FILE = Path(__file__).with_name("common_phrases.json")


def common_phrases(vocabulary: Vocabulary) -> list[list[int]]:
    """Return the tokens of each phrase. This takes some 10 ms."""
    texts: list[str] = json.loads(_FILE.read_text(encoding="utf-8"))
    return [vocabulary.tokenize_inside(text, parse_special=False) for text in texts]
