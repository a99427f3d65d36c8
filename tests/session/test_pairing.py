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


def complaint(target: Any, draft: Any) -> str:
    with pytest.raises(PairError) as caught:
        check_pair(target, draft, "big.gguf", "small.gguf")
    assert caught.value.message.startswith("small.gguf cannot draft for big.gguf: ")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_equal_tables_share_everything() -> None:
    assert check_pair(TABLE, TABLE, "t", "d") == 5


@pytest.mark.parametrize("entry", [b"[PAD5]", b"<pad>", b""])
def test_padding_at_the_end_of_either_is_fine(entry: bytes) -> None:
    padded = replace(TABLE, entries=(*TABLE.entries, entry, entry))
    assert check_pair(TABLE, padded, "t", "d") == 5
    assert check_pair(padded, TABLE, "t", "d") == 5


def test_entries_marked_as_unused_are_padding() -> None:
    padded = replace(TABLE, entries=(*TABLE.entries, b"<|dummy|>"), unused=frozenset({5}))
    assert check_pair(padded, TABLE, "t", "d") == 5


def test_real_tokens_at_the_end_are_not_padding() -> None:
    more = replace(TABLE, entries=(*TABLE.entries, b"<|call|>"))
    for target, draft, owner in ((more, TABLE, "big.gguf"), (TABLE, more, "small.gguf")):
        assert f"1 tokens exist in {owner} only: 5 '<|call|>'" in complaint(target, draft)


def test_differing_tokens_are_named_and_counted() -> None:
    other = replace(TABLE, entries=(b"<s>", b"</s>", b"a", b"c", b"\xff"))
    message = complaint(TABLE, other)
    assert "2 of 5 tokens differ: 3 'b' and 3 'c', 4 'ab' and 4 '\ufffd'" in message
    many = replace(TABLE, entries=(b"1", b"2", b"3", b"4", b"5"))
    assert complaint(TABLE, many).endswith("...")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": 1}, "different kinds"),
        ({"special": {"bos": 0, "eos": 2, "eot": -1}}, "eos tokens differ: 1 '</s>' and 2 'a'"),
        ({"special": {"bos": 0, "eos": 1, "eot": 4}}, "eot tokens differ: none and 4 'ab'"),
        ({"add_bos": True}, "only small.gguf begins a text with a bos token"),
    ],
)
def test_kinds_and_special_tokens_must_agree(change: dict[str, object], message: str) -> None:
    assert message in complaint(TABLE, replace(TABLE, **change))
