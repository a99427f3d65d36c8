"""The tokens of a GGUF model."""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from specgen.errors import BackendError, PromptError, UsageError
from specgen.llama.library import llama_cpp

#: The size of the first buffer for a token's bytes; most tokens fit.
_PIECE_BYTES = 64
#: A buffer for the tokens of a text of usual length: making the type takes longer than filling it.
_USUAL_TOKENS = 256
_Usual = llama_cpp.llama_token * _USUAL_TOKENS
#: The number of entries that `digest` reads, about.
_N_SAMPLED = 2048
#: llama.cpp's attributes of control tokens that take the white space beside them.
_STRIPPING = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
#: The attributes of tokens whose names are parsed only on request.
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
#: A marker before text that continues other text; no vocabulary has a token that joins it to the
#: text.
_MARKER = "☺"
#: llama.cpp splits a text into words by std::regex, which calls itself for each character of a word
#: or of white space, and of some models' words with spaces in them: in 8 MB some 20,000 of them end
#: the process (llama.cpp #21919, #26965). A frame has some 400 bytes. Texts with longer lines than
#: the first are tokenized in a thread with a stack for its longest line; words longer than the last
#: are refused.
_LINE, _FRAME_BYTES, LONGEST_RUN = 1000, 1024, 1 << 20
_LINES, _WORDS = (re.compile(pattern, re.ASCII) for pattern in (r"[^\n]+\s*|\s+", r"\S+\s*|\s+"))
#: The size of a thread's stack is set for all threads that begin meanwhile; and one such stack at a
#: time is enough.
_deep = threading.Lock()


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that llama.cpp finds in a text by its name if it is to parse special tokens, and
    whether white space beside the name is dropped.
    """

    token: int
    name: str
    strips_before: bool
    strips_after: bool


class LlamaVocabulary:
    """The tokens of an open GGUF model. `texts` are what some of them add to the text, if not
    llama.cpp's.
    """

    def __init__(self, model: Any, texts: Mapping[int, bytes] | None = None) -> None:
        self._model = model
        #: llama.cpp's vocabulary.
        self.handle = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self.handle)
        self._pieces: dict[int, bytes] = dict(texts or {})
        self._is_end: dict[int, bool] = {}
        self._ends: list[int] | None = None
        self._controls: list[ControlToken] | None = None
        self._views: dict[frozenset[int], LlamaVocabulary] = {}
        #: The bytes of the longest entry, and whether tokens take white space beside them; None:
        #: not counted.
        self._longest: int | None = None
        self._strips = False

    @property
    def add_bos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_bos(self.handle))

    @property
    def kind(self) -> int:
        """llama.cpp's number of the vocabulary type (SPM, BPE, WPM, ...); 0 is none."""
        return int(llama_cpp.llama_vocab_type(self.handle))

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens by role; -1 for a token that the model does not have."""
        return self._by_role("bos", "eos", "eot")

    def infill_tokens(self) -> dict[str, int]:
        """Return the fill-in-the-middle tokens by llama.cpp's names; -1 for one that the model does
        not have.
        """
        return self._by_role("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")

    def _by_role(self, *roles: str) -> dict[str, int]:
        """Return tokens by llama.cpp's names of their roles; -1 for one that the model does not
        have.
        """
        return {role: getattr(llama_cpp, f"llama_vocab_{role}")(self.handle) for role in roles}

    def check(self, tokens: Sequence[int]) -> None:
        """Raise `PromptError` for a token that is none of these: llama.cpp would end the process."""
        for token in tokens:
            if not 0 <= token < self.n_tokens:
                n = self.n_tokens
                raise PromptError(f"there is no token {token}: the model has {n} tokens")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokenize a text. Raise `UsageError` for a word of over a million characters: they are
        found by recursion.
        """
        data = _encoded(text)
        longest = _longest(_LINES, text) if len(text) > _LINE else 0
        if longest <= _LINE or self.kind != llama_cpp.LLAMA_VOCAB_TYPE_BPE:
            return self._tokenize(data, add_special, parse_special)
        if longest > LONGEST_RUN and (word := _longest(_WORDS, text)) > LONGEST_RUN:
            raise UsageError(
                f"the text has a word, or white space, of {word} characters: at most {LONGEST_RUN} "
                "can be tokenized"
            )
        tokenize = partial(self._tokenize, data, add_special, parse_special)
        return _with_stack(min(longest, 4 * LONGEST_RUN) * _FRAME_BYTES, tokenize)

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = max(_USUAL_TOKENS, len(data) + 8)
        while True:
            buffer = (llama_cpp.llama_token * capacity)() if capacity > _USUAL_TOKENS else _Usual()
            n: int = llama_cpp.llama_tokenize(
                self.handle, data, len(data), buffer, capacity, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            if -n <= capacity:
                raise BackendError(f"llama.cpp could not tokenize {len(data)} bytes of text")
            capacity = -n

    def fewest_tokens(self, text: str) -> int:
        """Return a least number of tokens, by the bytes of text and of the longest token; 0 if
        bytes are dropped.
        """
        if self.kind not in (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE):
            return 0
        data = _encoded(text)
        if self._longest is None:
            tokens = range(self.n_tokens)
            # Control tokens are read by their names, and add nothing to a text.
            entries = (self.token_bytes(token) or self.token_entry(token) for token in tokens)
            self._longest = max(map(len, entries))
            self._strips = any(self.token_attributes(token) & _STRIPPING for token in tokens)
        if self._strips:
            data = data.translate(None, b" \t\n\v\f\r")
        return len(data) // max(1, self._longest)

    def tokenize_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Tokenize text that continues other text: without the space that SentencePiece adds at a
        beginning.
        """
        if self.kind != llama_cpp.LLAMA_VOCAB_TYPE_SPM:
            return self.tokenize(text, add_special=False, parse_special=parse_special)
        marker = self.tokenize(_MARKER, add_special=False, parse_special=False)
        whole = self.tokenize(_MARKER + text, add_special=False, parse_special=parse_special)
        return whole[len(marker) :]

    def control_token(self, entry: str) -> int:
        tokens = self.tokenize(entry, add_special=False, parse_special=True)
        if len(tokens) != 1 or self.token_text(tokens[0]) != entry:
            return -1
        return tokens[0] if self.token_bytes(tokens[0]) == b"" else -1

    def has_control(self, entry: str) -> bool:
        return self.control_token(entry) >= 0

    def showing(self, entries: Sequence[str]) -> LlamaVocabulary:
        """Return this vocabulary, with the control tokens among these entries shown in the text."""
        shown = {self.control_token(entry): entry.encode() for entry in entries}
        shown.pop(-1, None)
        if not shown:
            return self
        key = frozenset(shown)
        if key not in self._views:
            self._views[key] = LlamaVocabulary(self._model, shown)
        return self._views[key]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id, special=False)
        return piece

    def token_text(self, token_id: int) -> str:
        return self.token_entry(token_id).decode("utf-8", "replace")

    def token_entry(self, token_id: int) -> bytes:
        self.check([token_id])
        return llama_cpp.llama_vocab_get_text(self.handle, token_id) or b""

    def token_entries(self) -> Iterator[bytes]:
        """Return the entries of all tokens, as `token_entry` does each, but in a third of the time."""
        address = ctypes.cast(llama_cpp.llama_vocab_get_text, ctypes.c_void_p).value or 0
        # This prototype keeps Python's lock, which takes longer to release than the call.
        entry = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)(address)
        vocabulary = ctypes.cast(self.handle, ctypes.c_void_p)
        return (text or b"" for text in map(entry, repeat(vocabulary), range(self.n_tokens)))

    def digest(self) -> str:
        """Return a hash that distinguishes vocabularies: of the kind, the size and a sample of the
        entries.
        """
        step = max(1, self.n_tokens // _N_SAMPLED)
        found = hashlib.blake2b(f"{self.kind} {self.n_tokens}".encode(), digest_size=16)
        for token_id in range(0, self.n_tokens, step):
            found.update(self.token_entry(token_id) + b"\0")
        return found.hexdigest()

    def token_attributes(self, token_id: int) -> int:
        self.check([token_id])
        return int(llama_cpp.llama_vocab_get_attr(self.handle, token_id))

    def is_control(self, token_id: int) -> bool:
        return bool(self.token_attributes(token_id) & _CONTROL)

    def control_tokens(self) -> Sequence[ControlToken]:
        """Return the control tokens with a name, in the order in which llama.cpp looks for them."""
        if self._controls is None:  # llama.cpp has no list of them, so all tokens are checked
            attributes = {token: self.token_attributes(token) for token in range(self.n_tokens)}
            found = [
                ControlToken(
                    token,
                    name,
                    bool(flags & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP),
                    bool(flags & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP),
                )
                for token, flags in attributes.items()
                if flags & _CONTROL and (name := self.token_text(token))
            ]
            self._controls = sorted(found, key=lambda each: -len(each.name.encode()))
        return self._controls

    def is_end(self, token_id: int) -> bool:
        is_end = self._is_end.get(token_id)
        if is_end is None:
            is_end = bool(llama_cpp.llama_vocab_is_eog(self.handle, token_id))
            self._is_end[token_id] = is_end
        return is_end

    def end_tokens(self) -> Sequence[int]:
        if self._ends is None:  # llama.cpp has no list of them, so all tokens are checked
            self._ends = [token_id for token_id in range(self.n_tokens) if self.is_end(token_id)]
        return self._ends

    def control_text(self, token_id: int) -> str:
        """Return a token as text, a control token by its name, as chat templates write it."""
        if token_id < 0:
            return ""
        return self._read_piece(token_id, special=True).decode("utf-8", "replace")

    def _read_piece(self, token_id: int, *, special: bool) -> bytes:
        self.check([token_id])
        capacity = _PIECE_BYTES
        while True:
            # A new buffer each time: one thread may tokenize prompts while another one decodes.
            buffer = ctypes.create_string_buffer(capacity)
            n: int = llama_cpp.llama_token_to_piece(
                self.handle, token_id, buffer, capacity, 0, special
            )
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n


def _encoded(text: str) -> bytes:
    """Return a text in UTF-8. Raise `PromptError` if it has half a surrogate pair, which UTF-8
    cannot express.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise PromptError(
            f"the text has half a surrogate pair, {half!r}, at character {error.start}",
            hint="give text that UTF-8 can express",
        ) from None


def _longest(pattern: re.Pattern[str], text: str) -> int:
    return max((found.end() - found.start() for found in pattern.finditer(text)), default=0)


def _with_stack(n_bytes: int, function: Callable[[], list[int]]) -> list[int]:
    # After Ctrl-C the executor waits for the end of its thread: the model must stay until the text
    # is read.
    with _deep, ThreadPoolExecutor(1, "tokenizer") as executor:
        before = threading.stack_size(n_bytes + (1 << 20))
        try:
            found = executor.submit(function)  # the thread begins here
        except RuntimeError as error:
            raise BackendError("there is too little memory to tokenize so long a word") from error
        finally:
            threading.stack_size(before)
        return found.result()
