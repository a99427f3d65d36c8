"""The tokens of a GGUF model."""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any

from specgen.errors import BackendError, PromptError, UsageError
from specgen.llama.library import llama_cpp

#: The size of the first buffer for a token's bytes; most tokens fit.
_PIECE_BYTES = 64
#: The number of tokens that the first buffer for a short text holds.
_DEFAULT_CAPACITY = 256
#: The type of that buffer, made only once: making a ctypes array type is slower than filling it.
_DefaultBuffer = llama_cpp.llama_token * _DEFAULT_CAPACITY
#: The approximate number of entries that `digest` reads.
_N_DIGESTED = 2048
#: llama.cpp's attributes of control tokens that drop the white space next to them.
_STRIPPING = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
#: The attributes of tokens whose names are parsed only on request.
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
#: Put before a text that continues another text. No vocabulary merges it with the text after it.
_MARKER = "☺"
_WHITE_SPACE = b" \t\n\v\f\r"

# For BPE vocabularies, llama.cpp splits a text into words with std::regex, which recurses once per
# character of a word or of white space. With the usual stack of 8 MB, a run of about 20,000
# characters ends the process (llama.cpp #21919, #26965). So texts with long lines are tokenized in
# a thread with a larger stack. (Lines, since some models' words contain spaces.)

#: The maximum length of a line, in characters, that is tokenized without such a thread.
_MAX_DIRECT_LINE = 1000
#: The maximum length, in characters, of a word or of white space. Longer ones are refused.
MAX_RUN = 1 << 20
#: The stack does not grow for longer lines, which would need gigabytes: hardly any line is a single
#: word.
_MAX_STACKED_LINE = 4 * MAX_RUN
#: The stack that is reserved per character: a frame has about 400 bytes.
_FRAME_BYTES = 1024
#: The stack that is reserved for everything else.
_BASE_STACK_BYTES = 1 << 20
#: Matches a line with the white space after it.
_LINES = re.compile(r"[^\n]+\s*|\s+", re.ASCII)
#: Matches a word with the white space after it.
_WORDS = re.compile(r"\S+\s*|\s+", re.ASCII)
#: Held while there is such a thread. Python sets the stack size for all threads that start
#: meanwhile, and one large stack at a time is enough.
_large_stack = threading.Lock()


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that llama.cpp recognises in a text by its name when it parses special tokens."""

    #: The token's id.
    token: int
    #: Its name, such as ``<|im_end|>``.
    name: str
    #: Whether white space before the name is dropped.
    strips_before: bool
    #: Whether white space after the name is dropped.
    strips_after: bool


class LlamaVocabulary:
    """The tokens of an open GGUF model. See `specgen.text.vocabulary.Vocabulary`."""

    def __init__(
        self,
        model: Any,
        texts: Mapping[int, bytes] | None = None,
    ) -> None:
        """Read the tokens of a model.

        Args:
            model: llama.cpp's pointer to the model.
            texts: The bytes that some tokens add to the text, where these differ from llama.cpp's.
        """
        self._model = model
        #: llama.cpp's pointer to the vocabulary.
        self.handle = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self.handle)
        #: A cache of `token_bytes`.
        self._pieces: dict[int, bytes] = dict(texts or {})
        #: A cache of `is_end`.
        self._is_end: dict[int, bool] = {}
        #: A cache of `showing`, by the shown tokens.
        self._views: dict[frozenset[int], LlamaVocabulary] = {}

    # --- the vocabulary

    @property
    def add_bos(self) -> bool:
        """Whether a text starts with a beginning-of-text token."""
        return bool(llama_cpp.llama_vocab_get_add_bos(self.handle))

    @property
    def kind(self) -> int:
        """llama.cpp's number for the vocabulary type (SPM, BPE, WPM, ...); 0 if there is none."""
        return int(llama_cpp.llama_vocab_type(self.handle))

    def digest(self) -> str:
        """Return a hash of the vocabulary's type and size and of a sample of its entries."""
        step = max(1, self.n_tokens // _N_DIGESTED)
        digest = hashlib.blake2b(f"{self.kind} {self.n_tokens}".encode(), digest_size=16)
        for token_id in range(0, self.n_tokens, step):
            digest.update(self.token_entry(token_id) + b"\0")
        return digest.hexdigest()

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens by role; -1 for a token that the model does not have."""
        return self._by_role("bos", "eos", "eot")

    @property
    def line_break_token(self) -> int:
        """The token of a line break; -1 if there is none."""
        return int(llama_cpp.llama_vocab_nl(self.handle))

    def infill_tokens(self) -> dict[str, int]:
        """Return the fill-in-the-middle tokens by llama.cpp's names; -1 for a missing one."""
        return self._by_role("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")

    def _by_role(self, *roles: str) -> dict[str, int]:
        return {role: getattr(llama_cpp, f"llama_vocab_{role}")(self.handle) for role in roles}

    def check(self, tokens: Sequence[int]) -> None:
        """Check that all tokens exist, since llama.cpp ends the process for an unknown one.

        Raises:
            PromptError: If a number is not a token of this vocabulary.
        """
        for token in tokens:
            if not 0 <= token < self.n_tokens:
                raise PromptError(
                    f"there is no token {token}: the model has {self.n_tokens} tokens"
                )

    def showing(self, entries: Sequence[str]) -> LlamaVocabulary:
        """Return a view of this vocabulary in which some control tokens add text.

        Args:
            entries: The entries of the tokens to show. Those that are not control tokens are
                ignored.
        """
        shown = {self.control_token(entry): entry.encode() for entry in entries}
        shown.pop(-1, None)  # the entries that are not control tokens
        if not shown:
            return self
        key = frozenset(shown)
        if key not in self._views:
            self._views[key] = LlamaVocabulary(self._model, shown)
        return self._views[key]

    # --- from text to tokens

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool,
        parse_special: bool,
    ) -> list[int]:
        """See `Vocabulary.tokenize`.

        Raises:
            PromptError: If the text has half a surrogate pair.
            UsageError: If a word has more than `MAX_RUN` characters, for which no stack is large
                enough.
        """
        data = _encode(text)
        tokenize = partial(self._tokenize, data, add_special, parse_special)
        # Only BPE vocabularies use the recursive std::regex (see the comment on `MAX_RUN`).
        if self.kind != llama_cpp.LLAMA_VOCAB_TYPE_BPE or len(text) <= _MAX_DIRECT_LINE:
            return tokenize()
        longest_line = _longest(_LINES, text)
        if longest_line <= _MAX_DIRECT_LINE:
            return tokenize()
        longest_word = _longest(_WORDS, text) if longest_line > MAX_RUN else 0
        if longest_word > MAX_RUN:
            raise UsageError(
                f"the text has a word, or white space, of {longest_word} characters: "
                f"at most {MAX_RUN} can be tokenized"
            )
        return _with_stack(min(longest_line, _MAX_STACKED_LINE) * _FRAME_BYTES, tokenize)

    def _tokenize(
        self,
        data: bytes,
        add_special: bool,
        parse_special: bool,
    ) -> list[int]:
        """Let llama.cpp tokenize a text in UTF-8, with a buffer that is large enough."""
        # Hardly any text has more tokens than bytes; a few are added around it (`add_special`).
        capacity = max(_DEFAULT_CAPACITY, len(data) + 8)
        while True:
            if capacity > _DEFAULT_CAPACITY:
                buffer = (llama_cpp.llama_token * capacity)()
            else:
                buffer = _DefaultBuffer()
            n: int = llama_cpp.llama_tokenize(
                self.handle,
                data,
                len(data),
                buffer,
                capacity,
                add_special,
                parse_special,
            )
            if n >= 0:
                return list(buffer[:n])
            # A negative result means that the buffer is too small, and -n tokens are needed.
            if -n <= capacity:  # the buffer had room, so something else went wrong
                raise BackendError(f"llama.cpp could not tokenize {len(data)} bytes of text")
            capacity = -n

    def tokenize_inside(
        self,
        text: str,
        *,
        parse_special: bool = False,
    ) -> list[int]:
        """Tokenize a text that continues another text.

        SentencePiece (SPM) adds a space at the beginning of a text. To avoid it, the text is
        tokenized after a marker, whose tokens are then dropped.
        """
        if self.kind != llama_cpp.LLAMA_VOCAB_TYPE_SPM:
            return self.tokenize(text, add_special=False, parse_special=parse_special)
        marker = self.tokenize(_MARKER, add_special=False, parse_special=False)
        tokens = self.tokenize(_MARKER + text, add_special=False, parse_special=parse_special)
        return tokens[len(marker) :]

    def min_token_count(self, text: str) -> int:
        """Return a lower bound for the number of tokens of a text, without tokenizing it.

        The bound is the number of bytes divided by the length of the longest token. It is 0 for
        vocabulary types that may drop bytes.
        """
        if self.kind not in (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE):
            return 0
        data = _encode(text)
        if self._drops_white_space:
            data = data.translate(None, _WHITE_SPACE)
        return len(data) // max(1, self._longest_token_bytes)

    @cached_property
    def _longest_token_bytes(self) -> int:
        # A control token adds no bytes to a text, but its name in a text becomes one token.
        return max(
            len(self.token_bytes(token) or self.token_entry(token))
            for token in range(self.n_tokens)
        )

    @cached_property
    def _drops_white_space(self) -> bool:
        """Whether some tokens drop the white space next to them."""
        return any(self.token_attributes(token) & _STRIPPING for token in range(self.n_tokens))

    # --- from tokens to text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for control tokens."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._read_piece(token_id, special=False)
            self._pieces[token_id] = piece
        return piece

    def control_text(self, token_id: int) -> str:
        """Return a token as text; for a control token its name, as chat templates write it."""
        if token_id < 0:  # a special token that the model does not have
            return ""
        return self.shown_bytes(token_id).decode("utf-8", "replace")

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; for a control token its name."""
        return self._read_piece(token_id, special=True)

    def _read_piece(self, token_id: int, *, special: bool) -> bytes:
        """Return llama.cpp's bytes for a token; with `special`, control tokens by their names."""
        self.check([token_id])
        capacity = _PIECE_BYTES
        n_stripped_spaces = 0
        while True:
            # A new buffer each time: one thread may tokenize prompts while another one decodes.
            buffer = ctypes.create_string_buffer(capacity)
            n: int = llama_cpp.llama_token_to_piece(
                self.handle,
                token_id,
                buffer,
                capacity,
                n_stripped_spaces,
                special,
            )
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n  # the size that is needed

    def token_text(self, token_id: int) -> str:
        """Return the token's entry in the token table as text."""
        return self.token_entry(token_id).decode("utf-8", "replace")

    def token_entry(self, token_id: int) -> bytes:
        """Return the token's entry in the token table."""
        self.check([token_id])
        return llama_cpp.llama_vocab_get_text(self.handle, token_id) or b""

    def token_entries(self) -> Iterator[bytes]:
        """Yield the entries of all tokens, three times as fast as with `token_entry`."""
        address = ctypes.cast(llama_cpp.llama_vocab_get_text, ctypes.c_void_p).value or 0
        # PYFUNCTYPE keeps the GIL: releasing it would take longer than the call.
        get_text = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)(address)
        vocabulary = ctypes.cast(self.handle, ctypes.c_void_p)
        entries = map(get_text, repeat(vocabulary), range(self.n_tokens))
        return (entry or b"" for entry in entries)

    # --- control tokens

    def token_attributes(self, token_id: int) -> int:
        """Return llama.cpp's attributes of a token, as bits."""
        self.check([token_id])
        return int(llama_cpp.llama_vocab_get_attr(self.handle, token_id))

    def is_control(self, token_id: int) -> bool:
        """Return whether the name of a token is parsed only on request."""
        return bool(self.token_attributes(token_id) & _CONTROL)

    def control_token(self, entry: str) -> int:
        """Return the control token with this entry; -1 if there is none."""
        tokens = self.tokenize(entry, add_special=False, parse_special=True)
        if len(tokens) != 1 or self.token_text(tokens[0]) != entry:
            return -1
        # A token that adds text is an ordinary token.
        return tokens[0] if self.token_bytes(tokens[0]) == b"" else -1

    def has_control(self, entry: str) -> bool:
        """Return whether there is a control token with this entry."""
        return self.control_token(entry) >= 0

    def control_tokens(self) -> Sequence[ControlToken]:
        """Return the control tokens with a name, in the order in which llama.cpp looks for them.

        That is longest name first, then by token id.
        """
        return self._control_tokens

    @cached_property
    def _control_tokens(self) -> Sequence[ControlToken]:
        controls: list[ControlToken] = []
        for token in range(self.n_tokens):  # llama.cpp has no list of them
            attributes = self.token_attributes(token)
            name = self.token_text(token) if attributes & _CONTROL else ""
            if name:
                strips_before = bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP)
                strips_after = bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP)
                controls.append(ControlToken(token, name, strips_before, strips_after))
        controls.sort(key=lambda control: -len(control.name.encode()))
        return controls

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a text."""
        is_end = self._is_end.get(token_id)
        if is_end is None:
            is_end = bool(llama_cpp.llama_vocab_is_eog(self.handle, token_id))
            self._is_end[token_id] = is_end
        return is_end

    def end_tokens(self) -> Sequence[int]:
        """Return all tokens that end a text."""
        return self._end_tokens

    @cached_property
    def _end_tokens(self) -> Sequence[int]:
        # llama.cpp has no list of them.
        return [token_id for token_id in range(self.n_tokens) if self.is_end(token_id)]


def _encode(text: str) -> bytes:
    """Return a text in UTF-8; raise `PromptError` if it has half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise PromptError(
            f"the text has half a surrogate pair, {half!r}, at character {error.start}",
            hint="use characters that UTF-8 can represent",
        ) from None


def _longest(pattern: re.Pattern[str], text: str) -> int:
    """Return the length of the longest match."""
    return max((match.end() - match.start() for match in pattern.finditer(text)), default=0)


def _with_stack(n_bytes: int, tokenize: Callable[[], list[int]]) -> list[int]:
    """Call a function in a thread with room for `n_bytes` on its stack.

    After Ctrl-C the executor still waits for its thread, so the model is not freed while llama.cpp
    uses it.
    """
    with _large_stack, ThreadPoolExecutor(1, "tokenizer") as executor:
        old_size = threading.stack_size(n_bytes + _BASE_STACK_BYTES)
        try:
            tokens = executor.submit(tokenize)  # the thread starts here, with the large stack
        except RuntimeError as error:
            raise BackendError("there is too little memory to tokenize such a long word") from error
        finally:
            threading.stack_size(old_size)
        return tokens.result()
