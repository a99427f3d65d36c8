"""The cost-aware policy: draft as long as it is expected to save time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import numpy as np

from specgen.calibration.acceptance import (
    NGRAM_ORIGINS,
    Chances,
    TextWorths,
    new_chances,
    origin_of_rank,
)
from specgen.calibration.cost_table import ALONE, FREE, BatchShare, CostTable, Others, Price
from specgen.core.draft import NO_DRAFT, ROOT, Draft
from specgen.core.growing_tree import GrowingTree
from specgen.options import DraftOptions
from specgen.policy.base import RoundReport
from specgen.policy.beginning import may_read, worth_of_beginning
from specgen.policy.budget import Budget
from specgen.policy.draft_outcomes import DraftOutcomes
from specgen.policy.pace import Pace
from specgen.policy.plans import best_frontier, best_nodes
from specgen.policy.stopping import KnownRule, StoppingRule, row_bucket

#: If no costs were measured, this many plain decodes are observed before anything is drafted.
_N_FIRST = 2
#: After this many rounds without a plain decode one is made: its cost is what everything is compared
#: with.
_MAX_STALE = 64
#: The share of the remaining rounds over which the time to read the text is spread: the answer may
#: end sooner, or suit the draft less.
_CAUTION = 0.75
#: The expected gain of an n-gram draft must be this many times its cost: if a token's time or more was
#: lost, at the beginning of an answer, and if much was saved. (In replays of 31 answers, drafting
#: without a margin gained as much on average, and lost three times as much on the worst answer.)
_NGRAM_MARGINS = 2.4, 1.9, 1.1
#: The same for a model's draft: a model says how sure it is, and can be trusted more. (In the same
#: replays these gained as much as no margins, and lost a third as much on the worst answer.)
_MODEL_MARGINS = 1.2, 1.1, 1.0
#: Second guesses count with this share of their estimated chance: the cost of a row is certain, and
#: choosing among many small expected gains favours the overestimated ones. (With 1, trees were 6 %
#: slower than chains on a real pair whose rows cost 0.17 of a token.)
_SECOND = 0.6


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost.

    The aim is to finish the answer soon. A token that a round adds is worth the time that it
    would take otherwise: that of a plain decode, or less if recent rounds were faster. Its cost
    is the drafter's decodes and the larger batch of the target, as measured (`CostTable`). The
    number of tokens that a draft adds is the sum, over its tokens, of the chance that the token
    and all before it are accepted; these chances are learnt (`Chances`). Drafting nothing is a
    valid decision.

    A draft that is known as a whole is cut where its value is highest. A model's draft grows token
    by token, which is an optimal stopping problem (`StoppingRule`). Its solution also predicts
    what the model is worth before it runs. (The rule for a fixed length is Leviathan et al.'s,
    arXiv:2211.17192, section 3.4; for a tree's nodes, "decode the tree that maximises expected
    tokens per second", Sequoia's, arXiv:2402.12374.)

    Most learning is free: tokens that were proposed but not worth verifying are compared with the
    text that follows. In addition, a small budget of time pays for trials of a model that is not
    expected to pay. A drafter that loses time in spite of its promise is put aside for a while.

    Beside other sequences, a token's plain decode is a part of a batch that all of them share, and
    a drafted row costs what it adds to that batch (`BatchShare`).

    A policy decides for one text. `costs` is the target's table, to which observed times are
    added. `chances` are by origin; their counts cover all texts and may be shared with other
    policies.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        chances: MutableMapping[str, Chances] | None = None,
    ) -> None:
        self._n_max = options.n_max
        self._p_min = options.stops_below
        self._table = costs
        #: The costs of this sequence's rows in the round's batch.
        self._costs = BatchShare(costs)
        #: The chances from all texts, and those in this text; by origin.
        self._known = {} if chances is None else chances
        self._chances: dict[str, Chances] = {}
        #: Rules by drafter and by the price of a row, which depends on the other sequences in the batch.
        self._rules: dict[tuple[str, int], KnownRule] = {}
        #: The rules in use until the round ends or a price changes, by drafter.
        self._in_force: dict[str, StoppingRule] = {}
        self._price = FREE
        self._budget = Budget()
        self._n_stale = 0
        self._n_left = 0
        self._pace = Pace()
        self._has_model_begun = False
        #: The seconds that a draft of n tokens adds to a plain decode, for each n from 0.
        self._extra_s: list[float] = []
        #: For each token of the draft in progress, the chance that it and all before it are accepted.
        self._path: list[float] = []
        #: Whether this round tries a model that is not expected to pay, and which drafter started.
        self._is_trial = False
        self._began: str | None = None
        self._invested_s = 0.0
        self._outcomes = DraftOutcomes(self._of)
        #: The accounts of the drafters that were considered in this text, by origin.
        self._asked: dict[str, TextWorths] = {}

    # --- before and while drafting -----------------------------------------------------------

    @property
    def needs_confidence(self) -> bool:
        return True

    def room(self, n_left: int, others: Others = ALONE) -> int:
        self._n_left = n_left
        self._costs = BatchShare(self._table, others)
        self._path.clear()
        self._outcomes.begin_round()
        self._in_force.clear()
        self._extra_s.clear()
        self._is_trial = False
        self._began, self._invested_s = None, 0.0
        self._budget.begin_round()
        if not self._table or (self._costs.n_seen < _N_FIRST and not self._costs.is_known):
            return 0
        self._n_stale += 1
        if self._n_stale > _MAX_STALE:
            return 0
        return self._n_max

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        if price == FREE:  # its draft is judged once it is known
            return 1e-9
        if price != self._price:
            self._price = price
            self._in_force.clear()
        n, chance = len(after), self._chance_of(after)
        if n >= self._n_max:
            return 0.0
        if n == 0 and self._is_too_early(origin, price):
            value = 0.0
        else:
            value = self._rule(origin).value(n, chance) + price.next_s - price.first_s
            if n > 0:
                value -= price.backlog_s / self._horizon()
            else:
                value = self._begun(origin, price, value)
        if n == 0:
            self._is_trial = value <= 0.0 and self._may_try(origin, price)
        if value > 0.0 or self._is_trial:
            self._began, self._invested_s = origin, price.backlog_s
            return max(value, 1e-9)
        return value

    def _begun(self, origin: str, price: Price, value: float) -> float:
        """The expected gain of starting a model, in seconds a round. In this text its rounds have
        seemed to be worth `value` so far."""
        plain_s, chances = self._costs.seconds(1), self._of(origin)
        chances.expect(value / plain_s, self._costs.n_sequences)
        worths = self._asked[origin] = chances.worths
        worth = worth_of_beginning(
            value,
            price,
            worths,
            chances.n_looks,
            could_pay=lambda: self._ideal_s(price) > 0.0,
            plain_s=plain_s,
            # In rounds in which n-grams draft, as in a text that copies, a model adds little.
            horizon=self._horizon() * self._pace.left_by_ngrams,
            elapsed_s=self._budget.elapsed_s,
        )
        return min(worth, 0.0) if self._budget.is_put_aside(origin) else worth

    def _is_too_early(self, origin: str, price: Price) -> bool:
        """Whether a model without a look at this text may not read it yet, whatever its expected
        gain, so that the gain need not be computed."""
        chances = self._of(origin)
        worths = chances.counts.worths_at(self._costs.n_sequences)
        if chances.n_looks or worths.start is None:
            return False
        self._asked[origin] = worths
        plain_s, elapsed_s = self._costs.seconds(1), self._budget.elapsed_s
        return not may_read(price, worths, plain_s=plain_s, elapsed_s=elapsed_s)

    def _horizon(self) -> float:
        """A cautious estimate of the rounds that are left."""
        return _CAUTION * max(1.0, self._n_left / max(1.0, self._pace.tokens_a_round))

    def worth(self, draft: Draft) -> float:
        return self._best(draft)[1]

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        if n_drafted >= self._n_max or confidence < self._p_min:
            return False
        chances = self._of(origin)
        chances.see(confidence)
        before = self._path[n_drafted - 1] if n_drafted else 1.0
        chance = before * chances.chance(confidence)
        self._path[n_drafted:] = [chance]
        self._outcomes.confidences[n_drafted] = confidence
        if self._is_trial:
            return n_drafted < self._budget.n_tokens
        return self._rule(origin).takes(n_drafted, chance) > 0.0

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        if n_drafted >= self._n_max:
            return False
        if self._is_trial:
            return n_drafted < self._budget.n_tokens
        chance = self._path[n_drafted - 1] if 0 < n_drafted <= len(self._path) else 1.0
        return self._rule(origin).value(n_drafted, chance) > 0.0

    def frontier(
        self, tree: GrowingTree, n_deepest: int, n_most: int, seconds: Callable[[int], float]
    ) -> list[int]:
        self._look_at(tree)
        nodes = [
            node
            for node in tree.open_nodes(n_deepest - 1)
            if tree.ranks[node] > 0 or tree.probabilities[node] >= self._p_min
        ]
        if self._is_trial:
            n_levels = self._budget.n_tokens
            return [n for n in nodes if tree.is_first_choice[n] and tree.depths[n] < n_levels - 1]
        nodes.sort(key=tree.path_chances.__getitem__, reverse=True)
        token_s, extra_s = self._token_worth_s(tree.origin), self._extra_behind(tree.n_before)
        return best_frontier(
            tree,
            nodes[:n_most],
            self._rule(tree.origin),
            token_s,
            extra_s,
            next_s=self._price.next_s,
            seconds=seconds,
        )

    def pick(self, tree: GrowingTree, draft: Draft) -> Draft:
        if tree.n_before == 0:
            return self.trim(draft)
        before = self._chance_before(tree, ROOT)
        chances = [before * chance for chance in self._path_chances(draft)]
        token_s, extra_s = self._token_worth_s(tree.origin), self._extra_behind(tree.n_before)
        return draft.only(best_nodes(chances, token_s, extra_s)[0])

    def trim(self, draft: Draft) -> Draft:
        self._outcomes.wait_for(draft)
        if len(draft) == 0:
            return draft
        if draft.is_drawn and not draft.is_chain:
            return self._trim_behind_draws(draft) if draft.has_free_end else draft
        if self._is_trial and self._began is not None:
            return draft if draft.is_chain else draft.only(draft.first_children())
        if not draft.is_chain:
            return self._trim_tree(draft)
        # A token that was drawn at random is not dropped because of what it is.
        kept = draft.first(max(draft.n_drawn, self._best(draft)[0]))
        if not len(kept):
            self._leave(draft)
        if self._began is None and len(kept):
            self._began = kept.origins[0]
        return kept

    def _trim_tree(self, draft: Draft) -> Draft:
        """The nodes of a tree that are worth verifying, the likeliest first."""
        kept = draft.only(self._best_of_tree(draft, self._token_worth_s(draft.origins[0]))[0])
        if not len(kept):
            self._leave(draft)
        elif self._began is None:
            self._began = kept.origins[0]
        return kept

    def _trim_behind_draws(self, draft: Draft) -> Draft:
        """All nodes that were drawn at random, and those nodes behind them that are worth verifying.
        The choice depends on the draws; it biases nothing, since all draws are verified anyway."""
        n_drawn = draft.n_drawn
        origin = draft.origins[n_drawn]
        behind: list[int] = []
        if not self._budget.is_put_aside(origin):
            chances, token_s = self._path_chances(draft)[n_drawn:], self._token_worth_s(origin)
            behind, _ = best_nodes(chances, token_s, self._extra_behind(n_drawn))
        return draft.only([*range(n_drawn), *(n_drawn + node for node in behind)])

    def _look_at(self, tree: GrowingTree) -> None:
        """Compute the path chances of the tree's new nodes."""
        chances, origin = tree.path_chances, tree.origin
        for node in range(len(chances), len(tree)):
            rank, confidence = tree.ranks[node], tree.probabilities[node]
            if rank == 0:
                self._of(origin).see(confidence)
            before = self._chance_before(tree, tree.parents[node])
            chances.append(before * self._chance_of_guess(origin, rank, confidence))

    def _chance_before(self, tree: GrowingTree, node: int) -> float:
        """The chance that a node, or `ROOT`, and all before it are accepted."""
        if node != ROOT:
            return tree.path_chances[node]
        return self._path[tree.n_before - 1] if tree.n_before else 1.0

    # --- afterwards --------------------------------------------------------------------------

    def observe(self, report: RoundReport) -> None:
        self._in_force.clear()
        self._table.observe(report.n_rows, report.target_s)
        if not self._table:  # by the clock, the first decode took no time
            return
        if not len(report.draft):
            self._n_stale = 0
        n_committed = max(1, len(report.committed), len(report.path) + 1)
        for origin, saved_s in self._outcomes.observe(report, self.token_s):
            self._budget.show(origin, saved_s, self._costs.seconds(1))
        if not self._costs.is_known:
            return
        plain_s = self._costs.seconds(1)
        target_s = report.target_s * self._costs.of_batch(1 + len(report.draft), report.n_rows)
        # Reading the text is an investment in later rounds, and is not charged to this one.
        round_s = max(0.0, report.draft_s - self._invested_s) + target_s
        self._budget.spend(
            self._began,
            saved_s=n_committed * plain_s - round_s,
            elapsed_s=round_s,
            plain_s=plain_s,
            is_trial=self._is_trial,
        )
        for origin, worths in self._asked.items():
            saved_s = n_committed * plain_s - round_s - self._invested_s
            worths.account(saved_s / plain_s if origin == self._began else 0.0, n_committed)
        by_ngrams = self._began in NGRAM_ORIGINS
        if self._began is not None and not by_ngrams and not self._has_model_begun:
            self._has_model_begun = True
            self._pace.begin_anew()
        self._pace.observe(round_s, n_committed, plain_s, by_ngrams=by_ngrams)

    def finish(self) -> None:
        for chances in self._chances.values():
            chances.end_text()

    def _leave(self, draft: Draft) -> None:
        """Follow the nodes of an unverified n-gram draft that were worth verifying without a margin:
        the text will show what they would have saved."""
        origin = draft.origins[0]
        if origin not in NGRAM_ORIGINS or self._outcomes.is_following(origin):
            return
        nodes, _ = best_nodes(self._path_chances(draft), self.token_s, self._extra())
        if nodes:
            self._outcomes.follow(draft.only(nodes), self._extra()[len(nodes)])

    # --- what is expected --------------------------------------------------------------------

    @property
    def token_s(self) -> float:
        """What a token is worth, in seconds."""
        plain_s = self._costs.seconds(1)
        return plain_s if self._pace.token_s is None else min(plain_s, self._pace.token_s)

    def _token_worth_s(self, origin: str) -> float:
        """The seconds that an expected token of a drafter counts for: less than a token is worth, as
        long as little was saved in this answer.

        A cost is certain and a gain is not. So at first only drafts that are clearly worth it are
        made, and a short answer, or one that suits no draft, loses little.
        """
        worst, first, last = _NGRAM_MARGINS if origin in NGRAM_ORIGINS else _MODEL_MARGINS
        credit = self._budget.credit_of(origin) / self._costs.seconds(1)
        if credit < 0.0:
            margin = first + min(-credit, 1.0) * (worst - first)
        else:
            margin = last + (first - last) / (1.0 + credit)
        return min(self.token_s, self._costs.seconds(1) / margin)

    def _of(self, origin: str) -> Chances:
        chances = self._chances.get(origin)
        if chances is None:
            known = self._known.setdefault(origin, new_chances(origin))
            chances = self._chances[origin] = known.for_new_text()
        return chances

    def _chance_of(self, draft: Draft) -> float:
        """The chance that a chain is accepted whole; stores the chances of its tokens in `_path`."""
        chance = 1.0
        for node, (origin, confidence) in enumerate(
            zip(draft.origins, draft.probabilities, strict=True)
        ):
            chance *= self._of(origin).chance(1.0 if confidence is None else confidence)
            self._path[node:] = [chance]
        return chance

    def _path_chances(self, draft: Draft) -> list[float]:
        """For each node of a draft, the chance that it and its ancestors are accepted."""
        chances: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            chance = self._of(origin_of_rank(origin, rank)).chance(
                1.0 if confidence is None else confidence
            )
            chances.append(chance if parent == ROOT else chance * chances[parent])
        return chances

    def _chance_of_guess(self, origin: str, rank: int, confidence: float) -> float:
        """The chance of a token that is its drafter's guess number `rank`, from 0, for a place."""
        chance = self._of(origin_of_rank(origin, rank)).chance(confidence)
        return chance if rank == 0 else _SECOND * chance

    def _best(self, draft: Draft) -> tuple[int, float]:
        """The length at which a chain is worth most, and that worth in seconds; for a tree, the number
        of nodes and their worth."""
        if not len(draft) or self._budget.is_put_aside(draft.origins[0]):
            return 0, 0.0
        token_s = self._token_worth_s(draft.origins[0])
        if not draft.is_chain:
            nodes, value_s = self._best_of_tree(draft, token_s)
            return len(nodes), value_s
        extra_s = self._extra()
        best_n, best_s, chance, gain_s = 0, 0.0, 1.0, 0.0
        for node, (origin, confidence) in enumerate(
            zip(draft.origins, draft.probabilities, strict=True)
        ):
            chance *= self._of(origin).chance(1.0 if confidence is None else confidence)
            gain_s += chance * token_s
            extra = extra_s[node + 1] if node + 1 < len(extra_s) else self._extra_for(node + 1)
            if gain_s - extra > best_s:
                best_n, best_s = node + 1, gain_s - extra
        return best_n, best_s

    def _best_of_tree(self, draft: Draft, token_s: float) -> tuple[list[int], float]:
        """The nodes of a tree that are worth most together, likeliest first, and their worth in
        seconds; an expected token counts `token_s`."""
        if self._budget.is_put_aside(draft.origins[0]):
            return [], 0.0
        return best_nodes(self._path_chances(draft), token_s, self._extra())

    def _extra(self) -> list[float]:
        """The seconds that a draft of n tokens adds to a plain decode, for each n from 0."""
        if not self._extra_s:
            self._extra_s = [self._extra_for(n) for n in range(self._n_max + 1)]
        return self._extra_s

    def _extra_behind(self, n_before: int) -> list[float]:
        """The seconds that n tokens behind a draft of `n_before` tokens add to the batch, for each n
        from 0."""
        extra_s = self._extra()
        if not n_before:
            return extra_s
        return [seconds - extra_s[n_before] for seconds in extra_s[n_before:]]

    def _extra_for(self, n_drafted: int) -> float:
        return self._costs.seconds(n_drafted + 1) - self._costs.seconds(1)

    def _rule(self, origin: str) -> StoppingRule:
        """The stopping rule for a drafter at the present prices."""
        rule = self._in_force.get(origin)
        if rule is None:
            rule = self._in_force[origin] = self._rule_now(origin)
        return rule

    def _rule_now(self, origin: str) -> StoppingRule:
        """The known stopping rule for a drafter and a row's price, or a new one if much has changed."""
        chances, token_s = self._of(origin), self._token_worth_s(origin)
        row_s = self._costs.seconds(2) - self._costs.seconds(1)
        prices = (self._price.next_s, token_s, row_s)
        key = (origin, row_bucket(token_s, row_s))
        known = self._rules.get(key)
        if known is not None and known.holds(chances.version, *prices):
            return known.rule
        batch_s = np.array([self._costs.seconds(n + 1) for n in range(self._n_max + 1)])
        rule = StoppingRule(
            batch_s, self._price.next_s, token_s, chances.frequencies(), chances.curve()
        )
        self._rules[key] = KnownRule(rule, chances.version, *prices)
        return rule

    # --- trials ------------------------------------------------------------------------------

    def _may_try(self, origin: str, price: Price) -> bool:
        """Whether to try a drafter that is not expected to pay, to learn whether that is still so.
        It is not tried if it could not pay even if it were always right."""
        n = min(self._budget.n_tokens, self._n_max)
        cost_s = price.first_s + price.backlog_s + (n - 1) * price.next_s
        cost_s += self._costs.seconds(n + 1) - self._costs.seconds(1)
        return self._budget.allows(cost_s) and self._ideal_s(price) > 0.0

    def _ideal_s(self, price: Price) -> float:
        """The seconds that a round would save with a draft of the best length, all of it accepted."""
        plain_s = self._costs.seconds(1)
        return max(
            k * plain_s
            - (self._costs.seconds(k + 1) - plain_s)
            - price.first_s
            - (k - 1) * price.next_s
            for k in range(1, self._n_max + 1)
        )
