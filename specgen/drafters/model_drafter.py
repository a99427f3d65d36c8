"""A small model drafts a chain or a tree for the large one, and a cheaper drafter may guess its
tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from specgen.drafters.expansion import Expansion, NodeBranches, RowsBeyond, expansion
from specgen.drafters.interface import DraftRequest
from specgen.method.backend import Backend, Batch
from specgen.method.cascade import Cascade
from specgen.method.cost_table import FREE, Price
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import Ask, Drafter, Drafting
from specgen.method.policy import Offer, Policy, RoundPlan, RoundResult
from specgen.system.arrays import Logits
from specgen.text.overlap import common_prefix_length

#: Tokens at the beginning of the text that a sliding window keeps: attention rests on them
#: (arXiv:2309.17453).
_N_SINK = 4
#: If more than twice as many tokens are to be read, a draft model reads the text's first few and so
#: many of its last: it agrees with the target nearly as often, unless the answer copies the text
#: (there n-grams draft).
_N_WINDOW = 64
#: The most tokens that usually are new: the target's own, and the last drafted one of a draft that
#: was accepted whole.
N_USUAL = 2
_RATE = 0.1  # how fast the seconds of a drafted token follow the latest ones


class Guesses:
    """A cheaper drafter that guesses the tokens of a draft model (Spector & Re, arXiv:2308.04623,
    section 3.2).

    The draft model decodes the guessed tokens in one batch, draws each token from its own
    distribution, and goes on in the same batch while the drawn token is the guessed one, as
    `MatchVerifier` does: so it drafts what it would without guesses. A policy decides how much to
    guess, by the costs of the draft model's decodes.
    """

    def __init__(self, drafters: Cascade, policy: Policy, caches: Sequence[Backend] = ()) -> None:
        self._drafters, self._policy = drafters, policy
        self._caches = caches  # in which the drafter decodes
        #: The last guess, behind `_n_before` drafted tokens, and what it was cut from. Whether its
        #: result is to come.
        self._guess = NO_DRAFT
        self._n_before = 0
        self._proposed: tuple[Draft, ...] = ()
        self._is_open = False
        self._plan: RoundPlan = RoundPlan("fixed", 0)
        self._draft_s = self._decode_s = 0.0
        #: Recent seconds for a drafted token; None before the first.
        self._token_s: float | None = None
        #: The drafted tokens behind the text that the drafter was shown, and the text's length
        #: then.
        self._shown: tuple[int, ...] = ()
        self._n_text = 0
        #: The guessed tokens of the present draft, and how many of them were right.
        self._n_guessed = self._n_right = 0
        self._why = ""  # the first reason of the present draft

    def token_s(self, plain_s: float) -> float:
        return plain_s if self._token_s is None else min(plain_s, self._token_s)

    def after(
        self, context: Sequence[int], drafted: Sequence[int], n_room: int, n_before: int
    ) -> Generator[Ask, Logits, Sequence[int]]:
        """Guess at most `n_room` tokens. The last `n_before` of the context are drafted too, by
        another drafter.
        """
        drafters, text, n_drafted = self._drafters, [*context, *drafted], n_before + len(drafted)
        n_same = common_prefix_length(self._shown, text[self._n_text :])
        if n_same < len(self._shown):  # some of what the drafter was shown did not become text
            drafters.rewind(self._n_text + n_same)
        self._shown, self._n_text = tuple(drafted), len(context)
        self._n_before, self._is_open = len(drafted), True
        n_max = min(self._policy.n_max, n_room)
        found = drafters.look_up(text, n_max, n_drafted)
        price = FREE if drafters.model is None else drafters.model.price(len(text))
        plan = self._policy.plan(Offer(n_room + 1, n_max, found, drafters.model_name, price))
        before_s = self._decoded_s()
        whole = yield from drafters.propose(text, plan, n_drafted)
        self._draft_s = self._decoded_s() - before_s
        guess = plan.stop.cut(whole)
        self._plan, self._proposed = plan, (found, whole)
        self._why = self._why or plan.why
        self._guess = guess if guess.is_chain else NO_DRAFT
        self._n_guessed += len(self._guess)
        return self._guess.tokens

    def decoded(self, seconds: float) -> None:
        self._decode_s = seconds

    def settle(self, drafted: Sequence[int]) -> None:
        """Report the result of the last guess; `drafted` are the tokens that the model has drafted."""
        if not self._is_open:
            return
        self._is_open = False
        added = tuple(drafted[self._n_before :])
        n_right = common_prefix_length(self._guess.tokens, added)
        self._n_right += n_right
        result = RoundResult(
            self._plan,
            self._guess.first(len(added)),
            tuple(range(n_right)),
            self._draft_s,
            self._decode_s,
            0,  # the draft model's decodes are in its cost table already
            added[: n_right + 1],
            # What goes on behind the draft is not compared with another one.
            tuple(each.first(len(added)) for each in self._proposed if each.is_chain),
        )
        self._policy.observe(result)
        self._drafters.observe(result)
        token_s = (self._draft_s + self._decode_s) / (n_right + 1)
        before = token_s if self._token_s is None else self._token_s
        self._token_s = before + _RATE * (token_s - before)

    def in_words(self) -> str:
        """Return what was guessed of the draft that is done, and begin the next one."""
        n_guessed, n_right, why = self._n_guessed, self._n_right, self._why
        self._n_guessed, self._n_right, self._why = 0, 0, ""
        if n_guessed:
            return f"the second draft guessed {n_guessed} of the draft's tokens, {n_right} of them right"
        return f"the second draft guessed nothing: {why or 'the draft is a single token'}"

    def rewind(self, n_tokens: int) -> None:
        self._drafters.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown, self._is_open = (), False

    def _decoded_s(self) -> float:
        return sum(cache.decode_s for cache in self._caches)


class ModelDrafter(Drafter):
    """Drafts with a model: chains, or trees like those of SpecInfer (arXiv:2305.09781) and EAGLE-2
    (arXiv:2406.16858).

    The model's cache keeps all tokens that became text, so no token is decoded twice. If a text
    outgrows the model's context, the cache is filled again with the text's first few tokens and as
    many of its latest as fill half of it.

    To look beyond the nodes of a tree, the model decodes them in one batch, each on its own branch
    of the cache. Leaves cost no decode, since one look finds all children of a node. After the
    round the branch that became text stays.

    It does not read what a chat template puts before every prompt, the request's `head`: it drafts
    nearly the same, and its prefill is shorter (1 to 4 % of an answer to a short prompt).

    Tokens from `n_shared_tokens` on exist in only one of the two vocabularies (padding) and are
    never drafted. With `guesses`, a cheaper drafter speeds up the model itself, which then drafts
    chains.
    """

    name = "model"

    def __init__(
        self,
        backend: Backend,
        request: DraftRequest,
        *,
        n_shared_tokens: int,
        guesses: Guesses | None = None,
    ) -> None:
        self._backend, self._request, self._costs = backend, request, request.costs
        self._n_shared_tokens = n_shared_tokens
        self._guesses = guesses if backend.rollback == "cells" else None
        self._slot = request.slot.branches(backend)
        self._sequence = self._slot.first
        self._n_ctx = request.slot.n_ctx(backend)
        self._branches = NodeBranches(backend, self._slot)
        self._n_agreed = 0  # the number of tokens on which cache and text agree for certain
        self._skipped = request.head  # the positions of the text that the cache leaves out
        replace(request, prompt=self._read(request.prompt)).reused(backend)
        #: The last tree, whose branches the cache holds, and the text's length before it.
        self._tree: Expansion | None = None
        self._n_text = 0
        #: The rows after the last tokens in the cache, which the next decode replaces, and how many
        #: were decoded then.
        self._rows, self._n_decoded = np.empty((0, 0), np.float32), 0

    @property
    def n_skipped(self) -> int:
        return len(self._skipped)

    def _read(self, text: Sequence[int]) -> Sequence[int]:
        skipped = self._skipped
        return [*text[: skipped.start], *text[skipped.stop :]] if skipped else text

    def price(self, n_context: int) -> Price:
        price = self._costs.price_of_draft(self.n_behind(n_context), N_USUAL)
        if self._guesses is None:
            return price
        return replace(price, next_s=self._guesses.token_s(price.next_s))

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        if self._tree is not None:
            self._keep_text(context, self._tree)
        n_max = self._make_room(len(context), plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        backend, request = self._backend, self._request
        rows = yield from self._catch_up(context)
        first = rows[0, : self._n_shared_tokens]
        backend.checkpoint(self._sequence)
        before = context[len(context) - n_drafted :]
        made = expansion(self.name, request, plan, before, backend.vocabulary, n_max)
        self._n_text = len(context)
        if self._guesses is not None:
            draft = yield from made.grow(first, self._guessed(made, context, n_drafted, rows))
            self._guesses.settle(made.tokens)
            return replace(draft, guesses=self._guesses.in_words())

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, Logits]:
            if self._tree is None:  # the cache holds all of the chain but its last token
                rows = yield from self._decode(made.tokens[-1:], n_wanted=1)
                return rows[:, : self._n_shared_tokens]
            batch = Batch()
            for node in nodes:
                position = self._n_text - self.n_skipped + made.depths[node]
                branch = self._branches.follow(node, made.parents[node], position)
                batch.add(made.tokens[node], position, (branch,), True)
            rows = yield Ask(backend, batch, self._costs)
            # Each node needs a branch and a row of logits.
            made.n_most = min(len(self._branches.free), backend.n_outputs)
            return rows[:, : self._n_shared_tokens]

        if request.branches:
            self._tree = made
            self._branches.begin()
            made.n_most = min(len(self._branches.free), backend.n_outputs)
        return (yield from made.grow(first, rows_beyond))

    def rewind(self, n_tokens: int) -> None:
        if self._guesses is not None:
            self._guesses.rewind(n_tokens)
        self._drop_tree()
        if n_tokens >= self._n_agreed:
            return
        if n_tokens < self._skipped.stop:
            self._empty()
            return
        self._backend.remove(self._sequence, n_tokens - self.n_skipped)
        self._n_agreed = n_tokens

    def _drop_tree(self, node: int = ROOT, n_kept: int = 0) -> None:
        """Remove the last tree from the cache, but for the path of `n_kept` nodes down to `node`."""
        if self._tree is not None:
            self._branches.keep(node, self._n_text - self.n_skipped, n_kept)
            self._n_agreed = max(self._n_agreed, self._n_text + n_kept)
            self._tree = None

    def _keep_text(self, context: Sequence[int], tree: Expansion) -> None:
        """Keep the nodes of the last tree that became text in the cache, and remove the others."""
        node, n_kept = ROOT, 0
        for token in context[self._n_text :]:
            child = tree.child(node, token)
            if child is None or child not in self._branches:
                break
            node, n_kept = child, n_kept + 1
        self._drop_tree(node, n_kept)

    def _empty(self) -> None:
        self._backend.remove(self._sequence)
        self._n_agreed, self._skipped = 0, range(0)

    def n_behind(self, n_context: int) -> int:
        """Return how many tokens are decoded before the next draft: those that the cache lacks, or
        the window.
        """
        return self._window_to_read(n_context) or max(1, self._n_lacking(n_context))

    def _n_lacking(self, n_context: int) -> int:
        # Most of what became text since the last draft is in the cache.
        return n_context - self.n_skipped - self._backend.length(self._sequence)

    def _window_to_read(self, n_context: int) -> int:
        """Return the size of the window that is read in place of the text; 0 if all that the cache
        lacks is read.
        """
        lacks_much = self._n_lacking(n_context) > 2 * _N_WINDOW
        return min(_N_WINDOW, self._n_ctx // 2) if lacks_much else 0

    def _make_room(self, n_context: int, n_max: int) -> int:
        """Slide the window if the text or a draft does not fit, or much is lacking; return how many
        may be drafted.
        """
        n_ctx, n_window = self._n_ctx, self._window_to_read(n_context)
        # The last drafted token is not decoded, so n tokens need n - 1 cells after the text.
        n_room = n_ctx - (n_context - self.n_skipped) + 1
        if n_window or n_room < min(n_max, max(1, n_ctx // 4)):
            n_window = n_window or n_ctx // 2
            if n_window <= _N_SINK:  # too small for a beginning and an end
                return 0
            self._empty()
            self._skipped = range(_N_SINK, _N_SINK + max(0, n_context - n_window))
            n_room = n_ctx - (n_context - self.n_skipped) + 1
        return min(n_max, n_room)

    def _catch_up(self, context: Sequence[int]) -> Generator[Ask, Logits, Logits]:
        """Bring the cache to `context`; return the logits after it, and after guesses behind it,
        float32[n, n_vocab].
        """
        backend, rows, new = self._backend, self._rows, list(context[self._n_agreed :])
        cached = list(backend.text(self._sequence)[max(0, self._n_agreed - self.n_skipped) :])
        first = len(rows) - 1 - (len(cached) - len(new))
        is_valid = self._n_decoded == backend.n_decoded_rows and first >= 0
        if is_valid and new and new == cached[: len(new)]:  # guesses became text
            rows = rows[first:]
        else:
            rows = yield from self._decode(self._missing(context), n_wanted=1)
        self._n_agreed = len(context)
        return rows

    def _missing(self, context: Sequence[int]) -> Sequence[int]:
        """Drop from the cache what is not a prefix of `context`; return the tokens that it then
        lacks, at least one.
        """
        backend, start = self._backend, max(0, self._n_agreed - self.n_skipped)
        context = self._read(context)
        n_same = common_prefix_length(backend.text(self._sequence)[start:], context[start:])
        n_kept = min(start + n_same, len(context) - 1)
        if backend.length(self._sequence) > n_kept:
            backend.remove(self._sequence, n_kept)
        return context[n_kept:]

    def _guessed(
        self, chain: Expansion, context: Sequence[int], n_drafted: int, rows: Logits
    ) -> RowsBeyond:
        """Decode the tokens of a chain together with guesses of those behind them."""
        guesses, backend = self._guesses, self._backend
        assert guesses is not None
        n_max, ahead = chain.n_max, backend.text(self._sequence)[len(context) - self.n_skipped :]

        def rows_beyond(_nodes: Sequence[int]) -> Generator[Ask, Logits, Logits]:
            nonlocal ahead, rows
            drafted = chain.tokens
            if ahead and ahead[0] == drafted[-1]:
                ahead, rows = ahead[1:], rows[1:]
            else:
                if ahead:
                    length = backend.length(self._sequence)
                    backend.remove(self._sequence, length - len(ahead))
                guesses.settle(drafted)
                n_room = min(n_max - len(drafted) - 1, backend.n_outputs - 1)
                ahead = yield from guesses.after(context, drafted, n_room, n_drafted)
                before_s = backend.decode_s
                tokens = [drafted[-1], *ahead]
                rows = yield from self._decode(tokens, n_wanted=len(tokens))
                self._rows, self._n_decoded = rows, backend.n_decoded_rows
                guesses.decoded(backend.decode_s - before_s)
            return rows[:1, : self._n_shared_tokens]

        return rows_beyond

    def _decode(self, tokens: Sequence[int], *, n_wanted: int) -> Generator[Ask, Logits, Logits]:
        """Decode tokens in batches; return the logits after the last `n_wanted`, or those in the
        last batch.
        """
        backend, logits = self._backend, None
        first = backend.length(self._sequence)
        for start in range(0, len(tokens), backend.n_batch):
            part, at = list(tokens[start : start + backend.n_batch]), first + start
            n = len(part)
            wants = [index >= len(tokens) - n_wanted for index in range(start, start + n)]
            batch = Batch(part, [*range(at, at + n)], [(self._sequence,)] * n, wants)
            logits = yield Ask(backend, batch, self._costs)
        assert logits is not None, "at least one token is decoded"
        return logits
