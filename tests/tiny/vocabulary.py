"""The tokens of a tiny model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tests.tiny.config import TinyConfig

#: Every longer prefix of these becomes a token of its own.
_WORDS = (
    " the", " and", " of", " to", " in", " is", " for", " with", " that", " it", " be", " not",
    " return", " def", " self", " if", " else", " import", " from", " =", " +", " (",
    "ing", "tion", "er", "on", "re", "ed", "es", "th", "    ", "\n\n", "é", "😀",
)  # fmt: skip

#: Token types as GGUF numbers them.
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6

_CONTROL_TOKENS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class TinyVocabulary:
    """The tokens of a tiny model, in the spelling of its tokenizer; the index is the id."""

    tokens: tuple[str, ...]
    #: GGUF's token types.
    types: tuple[int, ...]
    #: SentencePiece's scores; the higher, the earlier two tokens are merged into this one.
    scores: tuple[float, ...]
    #: BPE's merges, the earliest first; empty for other tokenizers.
    merges: tuple[str, ...]
    #: Tokens that are not padding; these come first.
    n_used: int
    bos: int
    eos: int
    #: End of a turn; the end-of-text token where the vocabulary has no such thing.
    eot: int

    def __len__(self) -> int:
        return len(self.tokens)


def tiny_vocabulary(config: TinyConfig) -> TinyVocabulary:
    """Raise ValueError if `n_vocab` leaves no room for what the tokenizer needs."""
    if config.architecture == "bert":
        vocabulary = _wordpiece()
    elif config.tokenizer == "bpe":
        vocabulary = _byte_level_bpe()
    else:
        vocabulary = _sentencepiece()
    vocabulary = _extended(vocabulary, config.control_tokens, CONTROL)
    vocabulary = dataclasses.replace(vocabulary, n_used=len(vocabulary))
    n_padding = 0 if config.n_vocab is None else config.n_vocab - len(vocabulary)
    if n_padding < 0:
        raise ValueError(f"n_vocab is {config.n_vocab}, the tokenizer needs {len(vocabulary)}")
    return _extended(vocabulary, [f"[PAD{index}]" for index in range(n_padding)], UNUSED)


def _extended(vocabulary: TinyVocabulary, tokens: Sequence[str], kind: int) -> TinyVocabulary:
    return dataclasses.replace(
        vocabulary,
        tokens=(*vocabulary.tokens, *tokens),
        types=(*vocabulary.types, *[kind] * len(tokens)),
        scores=(*vocabulary.scores, *[0.0] * len(tokens)),
    )


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if it is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    codes = {byte: byte for byte in visible}
    codes |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def _byte_level_bpe() -> TinyVocabulary:
    characters = byte_characters()
    tokens = list(characters)
    merges: list[str] = []
    for word in _WORDS:
        spelled = [characters[byte] for byte in word.encode()]
        for length in range(2, len(spelled) + 1):
            token = "".join(spelled[:length])
            if token not in tokens:
                merges.append(f"{token[:-1]} {token[-1]}")
                tokens.append(token)
    n_text = len(tokens)
    tokens += _CONTROL_TOKENS
    return TinyVocabulary(
        tokens=tuple(tokens),
        types=(NORMAL,) * n_text + (CONTROL,) * len(_CONTROL_TOKENS),
        scores=(0.0,) * len(tokens),
        merges=tuple(merges),
        n_used=len(tokens),
        bos=n_text,
        eos=n_text + 1,
        eot=n_text + 3,
    )


def _sentencepiece() -> TinyVocabulary:
    characters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = ["▁", *characters]
    for word in _WORDS:
        spelled = word.replace(" ", "▁")
        prefixes = [spelled[:length] for length in range(1, len(spelled) + 1)]
        pieces += [piece for piece in prefixes if piece not in pieces and "\n" not in piece]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    markers = _CONTROL_TOKENS[2:]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return TinyVocabulary(
        tokens=(*tokens, *markers),
        types=(*types, *[CONTROL] * len(markers)),
        scores=(*scores, *[0.0] * len(markers)),
        merges=(),
        n_used=len(tokens) + len(markers),
        bos=1,
        eos=2,
        eot=len(tokens) + 1,
    )


def _wordpiece() -> TinyVocabulary:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    letters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    tokens = (*special, *(f"▁{letter}" for letter in letters), *letters)
    return TinyVocabulary(
        tokens=tokens,
        types=(CONTROL,) * len(special) + (NORMAL,) * (len(tokens) - len(special)),
        scores=(0.0,) * len(tokens),
        merges=(),
        n_used=len(tokens),
        bos=2,
        eos=3,
        eot=3,
    )
