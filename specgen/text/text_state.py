"""The committed text of a sequence, its grammar state, its characters, and what drafts for it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import AnyStr

import numpy as np

from specgen.errors import BackendError
from specgen.method.draft import NO_DRAFT, ROOT, Distribution, Draft
from specgen.method.drafter import Drafter, Drafting, ready
from specgen.method.policy import RoundPlan, RoundResult
from specgen.system.arrays import Logits, TokenArray, best
from specgen.text.grammar.base import GrammarState
from specgen.text.sampling.chain import Sampler, likeliest

_Decoder = codecs.getincrementaldecoder("utf-8")
#: Tokens to make room for behind the text; there is more if a text outgrows it.
_ROOM = 512
#: Tokens that are compared at once: prompts may have many thousands.
_PIECE = 256


def n_common(one: Sequence[object], other: Sequence[object]) -> int:
    n, n_most = 0, min(len(one), len(other))
    while n < n_most and list(one[n : n + _PIECE]) == list(other[n : n + _PIECE]):
        n += _PIECE
    while n < n_most and one[n] == other[n]:
        n += 1
    return min(n, n_most)


def n_begun(text: AnyStr, mark: AnyStr) -> int:
    """Return how many characters at the end of a text may begin a mark that is not there as a whole."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)


class TextState:
    """The committed tokens of one text, and its grammar state. Penalties see the prompt, the grammar does not."""

    def __init__(self, prompt: Sequence[int], grammar: GrammarState | None = None) -> None:
        #: All committed tokens, prompt and answer. Read only; `commit` adds to it.
        self.tokens: list[int] = list(prompt)
        self._grammar = grammar
        self.has_grammar = grammar is not None
        #: The tokens that samplers were shown; the first `_n_shown` are those of the text.
        self._history, self._n_shown = np.zeros(len(prompt) + _ROOM, np.int64), 0

    def commit(self, token: int) -> None:
        """Add a token to the text. Raise ValueError if the grammar does not allow it."""
        if (before := self._grammar) is not None:
            self._grammar = before.after(token)
            before.forget()
        self.tokens.append(token)

    def history(self, path: Sequence[int], n_last: int) -> TokenArray:
        """Return the last `n_last` tokens (-1: all) of the text and `path`: int64[m], valid until the next call."""
        if n_last == 0:
            return self._history[:0]
        n_text, end = len(self.tokens), len(self.tokens) + len(path)
        if end > len(self._history):
            self._history = np.resize(self._history, 2 * end)
        self._history[self._n_shown : n_text] = self.tokens[self._n_shown :]
        self._history[n_text:end] = path
        self._n_shown = n_text
        return self._history[0 if n_last < 0 else max(0, end - n_last) : end]

    def grammar(self, path: Sequence[int] = ()) -> GrammarState | None:
        state = self._grammar
        if state is not None:
            for token in path:
                state = state.after(token)
        return state

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """Return the only token that the grammar allows after the text and `path`, if there is only one."""
        grammar = self.grammar(path)
        return grammar.forced() if grammar is not None else None

    def within_grammar(self, draft: Draft, before: Sequence[int] = ()) -> Draft:
        """Return the nodes of a draft that the grammar allows after the text and the tokens `before`."""
        try:
            states = {ROOT: self.grammar(before)}
        except ValueError:
            return NO_DRAFT
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            state = states.get(parent)
            if state is not None and state.allows(np.array([token]))[0]:
                states[node] = state.after(token)
        return draft.only([node for node in states if node != ROOT])


class Shaper:
    """Turns a row of logits into the distribution of the next token, by the samplers and the grammar."""

    def __init__(self, sampler: Sampler, state: TextState) -> None:
        self._sampler = sampler
        self._state = state
        self._looks_back = sampler.n_history != 0 or state.has_grammar

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        """Return the distribution after the text and `path`, float32[n_vocab]. Raise `BackendError`."""
        if not self._looks_back:
            return self._sampler.distribution(logits)
        grammar = self._state.grammar(path)
        forced = grammar.forced() if grammar is not None else None
        if forced is not None:
            # The mask alone may allow several end tokens: drafter and verifier take the same one.
            return Distribution.certain(forced)
        return self._sampler.distribution(
            logits if grammar is None else grammar.ending(logits),
            self._state.history(path, self._sampler.n_history),
            None if grammar is None or grammar.is_free else grammar.allows,
        )

    def likeliest(
        self, logits: Logits, path: Sequence[int], n: int
    ) -> tuple[list[int], list[float]]:
        """Return the n likeliest tokens after the text and `path`, and their probabilities."""
        grammar = self._state.grammar(path) if self._state.has_grammar else None
        if n <= self._sampler.n_likeliest and (grammar is None or grammar.is_free):
            return likeliest(logits, n)
        source = self.distribution(logits, path)
        order = best(source.probs, n)
        scale = self.top_probability(logits, path) / source.probs[order[0]]
        return source.token_ids[order].tolist(), (source.probs[order] * scale).tolist()

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float:
        """Return a token's largest probability: 1 if the grammar forces it, else that at temperature 1."""
        return 1.0 if self._state.forced(path) is not None else likeliest(logits, 1)[1][0]


class TextStream:
    """Turns the bytes of tokens into text, up to a stop string, of which a prefix is held back; bytes that are not
    UTF-8 become U+FFFD. A line that begins with fewer than `n_indent` spaces and tabs is a stop string, too."""

    def __init__(self, stops: Sequence[str] = (), n_indent: int = 0) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._decoder = _Decoder(errors="replace")
        self._stops = tuple(stops)
        self._short = (
            re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=([^ \t])|\Z)") if n_indent else None
        )
        self._held = ""
        self._shown: list[str] = []
        #: The stop string that was found.
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def flush(self) -> str:
        """Return the rest, at the end of the text; incomplete characters become U+FFFD."""
        return self.push(b"", final=True)

    def push(self, token_bytes: bytes, *, final: bool = False) -> str:
        """Take the bytes of a token; return the text that may be shown now."""
        text = self._decoder.decode(token_bytes, final)
        if self.stopped_by is not None:
            return ""
        if self._stops or self._short is not None:
            text = self._held + text
            hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
            n_held = max((n_begun(text, stop) for stop in self._stops), default=0)
            if self._short is not None and (short := self._short.search(text)) is not None:
                n_held = max(n_held, len(text) - short.start())
                hits += [(short.start(), "\n")] if short[1] else []
            if hits:
                index, self.stopped_by = min(hits)
                n_held = len(text) - index
            elif final:
                n_held = 0
            text, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        self._shown.append(text)
        return text

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        decoder = _Decoder(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)


@dataclass(slots=True)
class Cascade:
    """What drafts for one text: a `free` drafter (n-grams), one that decodes, or both. In each round `look_up` comes
    first, so that the plan, which `propose` carries out, knows what it found. The grammar allows all that is found."""

    free: Drafter | None = None
    model: Drafter | None = None
    state: TextState | None = None

    @property
    def model_name(self) -> str | None:
        return None if self.model is None else self.model.name

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round: return what the free drafter finds, at most `n_max` tokens; `n_drafted` are drafts."""
        if self.free is None or n_max < 1:
            return NO_DRAFT
        try:
            next(self.free.propose(context, RoundPlan("fixed", n_max), n_drafted))
        except StopIteration as ended:
            found: Draft = ended.value
        else:
            raise BackendError(f"{self.free.name} asks for a decode")
        if self.state is not None and self.state.has_grammar:
            found = self.state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return ready(plan.found)
        return self.model.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.rewind(n_tokens)
