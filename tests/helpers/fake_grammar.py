"""Grammars for tests on the fake backend: a finite automaton over token ids, and one that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import GrammarState


class FakeGrammar:
    """`rules[state][token]` is the state after the token. Tokens without a rule are not allowed.

    States are any integers, and a text begins in state 0. End-of-text tokens have rules, too, which
    should lead to a state without rules. The tokens in `end_tokens` are also allowed in the states
    in `may_end`, without a rule.
    """

    def __init__(
        self,
        rules: Mapping[int, Mapping[int, int]],
        *,
        may_end: frozenset[int] = frozenset(),
        end_tokens: tuple[int, ...] = (),
    ) -> None:
        self.rules = {
            state: {
                **(dict.fromkeys(end_tokens, -1) if state in may_end else {}),
                **rules.get(state, {}),
            }
            for state in {*rules, *may_end}
        }
        self.end_tokens = end_tokens

    @property
    def start(self) -> GrammarState:
        return FakeState(self, 0)


class FakeState(GrammarState):
    def __init__(self, grammar: FakeGrammar, state: int) -> None:
        self.grammar = grammar
        self.state = state
        self._children: dict[int, GrammarState] = {}

    def allows(self, token_ids: TokenArray) -> BoolArray:
        allowed = self._allowed()
        return np.array([token_id in allowed for token_id in token_ids.tolist()], np.bool_)

    def after(self, token_id: int) -> GrammarState:
        if token_id not in self._children:
            if token_id not in self._allowed():
                raise ValueError(f"the grammar does not allow token {token_id} here")
            self._children[token_id] = FakeState(self.grammar, self._allowed()[token_id])
        return self._children[token_id]

    def forget(self) -> None:
        self._children = {}

    def forced(self) -> int | None:
        allowed = self._allowed()
        if len(allowed) == 1:
            return next(iter(allowed))
        if allowed and allowed.keys() <= set(self.grammar.end_tokens):
            return next(token for token in self.grammar.end_tokens if token in allowed)
        return None

    def _allowed(self) -> Mapping[int, int]:
        return self.grammar.rules.get(self.state, {})


@dataclass(frozen=True)
class FailingState(GrammarState):
    """A state whose grammar fails after a few tokens, as llguidance does if it grows too large."""

    state: GrammarState
    #: The number of tokens that can still be followed.
    n_left: int
    #: The method that fails then.
    fails_in: Literal["allows", "after", "forced"]

    def allows(self, token_ids: TokenArray) -> BoolArray:
        self._check("allows")
        return self.state.allows(token_ids)

    def after(self, token_id: int) -> GrammarState:
        self._check("after")
        return FailingState(self.state.after(token_id), self.n_left - 1, self.fails_in)

    def forced(self) -> int | None:
        self._check("forced")
        return self.state.forced()

    def _check(self, method: str) -> None:
        if self.n_left == 0 and method == self.fails_in:
            raise BackendError("the grammar cannot be followed any further")
