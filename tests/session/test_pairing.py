"""Pairs are compared token by token, and the message says which tokens differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from specgen.drafters.vocabularies import check_pair
from specgen.errors import PairError

UNUSED = 2


@dataclass(frozen=True)
class Table:
    entries: tuple[bytes, ...] = (b"<s>", b"</s>", b"a", b"b", b"ab")
    kind: int = 2
    add_bos: bool = False
    special: dict[str, int] = field(default_factory=lambda: {"bos": 0, "eos": 1, "eot": -1})
    unused: frozenset[int] = frozenset()

    @property
    def n_tokens(self) -> int:
        return len(self.entries)

    def token_entry(self, token_id: int) -> bytes:
        return self.entries[token_id]

    def token_entries(self) -> Sequence[bytes]:
        return self.entries

    def token_attributes(self, token_id: int) -> int:
        return UNUSED if token_id in self.unused else 4

    def special_tokens(self) -> dict[str, int]:
        return self.special


TABLE: Any = Table()


MORE = replace(TABLE, entries=(*TABLE.entries, b"<|call|>"))


@pytest.mark.parametrize(
    "padded",
    [
        TABLE,
        *(
            replace(TABLE, entries=(*TABLE.entries, each, each))
            for each in (b"[PAD5]", b"<pad>", b"")
        ),
        replace(MORE, unused=frozenset({5})),
    ],
)
def test_padding_at_the_end_of_either_is_fine(padded: Any) -> None:
    assert check_pair(TABLE, padded, "t", "d") == 5
    assert check_pair(padded, TABLE, "t", "d") == 5


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (MORE, TABLE, "1 tokens exist in big.gguf only: 5 '<|call|>'"),
        (TABLE, MORE, "1 tokens exist in small.gguf only: 5 '<|call|>'"),
        (
            TABLE,
            replace(TABLE, entries=(b"<s>", b"</s>", b"a", b"c", b"\xff")),
            "2 of 5 tokens differ: 3 'b' and 3 'c', 4 'ab' and 4 '\ufffd'",
        ),
        (TABLE, replace(TABLE, entries=(b"1", b"2", b"3", b"4", b"5")), "and 3 '4', ..."),
        (TABLE, replace(TABLE, kind=1), "their tokenizers are of different kinds"),
        (
            TABLE,
            replace(TABLE, special={"bos": 0, "eos": 2, "eot": -1}),
            "their eos tokens differ: 1 '</s>' and 2 'a'",
        ),
        (
            TABLE,
            replace(TABLE, special={"bos": 0, "eos": 1, "eot": 4}),
            "their eot tokens differ: none and 4 'ab'",
        ),
        (TABLE, replace(TABLE, add_bos=True), "only small.gguf begins a text with a bos token"),
    ],
)
def test_what_differs_is_named_and_counted(target: Any, draft: Any, message: str) -> None:
    with pytest.raises(PairError) as caught:
        check_pair(target, draft, "big.gguf", "small.gguf")
    assert caught.value.message.startswith("small.gguf cannot draft for big.gguf: ")
    assert caught.value.message.endswith(message)
    assert caught.value.hint
