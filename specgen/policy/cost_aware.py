"""The cost-aware policy: draft as long as it is expected to save time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import numpy as np

from specgen.calibration.acceptance import (
    NGRAM_ORIGINS,
    Chances,
    Worths,
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

#: Decodes of a single row to see before anything is drafted where nothing was measured.
_N_FIRST = 2
#: Without a single-row decode in so many rounds, one is made: what plain decoding costs is what
#: everything is compared with.
_MAX_STALE = 64
#: The part of the prospective gain that what a drafter has to read first is weighed against: the
#: answer may end sooner, or suit the draft less.
_CAUTION = 0.75
#: How many times its cost a draft of n-grams has to be expected to gain: when a token's time or
#: more was lost, at an answer's beginning, and when much was saved. (In replays of 31 answers, no
#: margin gained as much on average, and lost three times as much on the worst answer.)
_NGRAM_MARGINS = 2.4, 1.9, 1.1
#: The same of a model's: it tells by itself how sure it is, and is better believed. (In the same
#: replays these gained as much as none, and lost a third as much on the worst answer.)
_MODEL_MARGINS = 1.2, 1.1, 1.0
#: What second guesses are taken for, as a share of the chance that they seem to have: a row is
#: paid for surely, and of many small expected gains those are picked that are overestimated. (With
#: 1, trees were 6 % slower than chains on a real pair whose rows cost 0.17 of a token.)
_SECOND = 0.6


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they take.

    The time of an answer is what counts, so a token that a round adds is worth the time in which
    it would otherwise come: a plain decode's, or less, if rounds lately were quicker. Against
    that stand the draft's decodes and the dearer batch of the target, by tables of what was
    measured (`CostTable`). How many tokens a draft of n adds is the sum of the chances that its
    tokens are accepted, each with all before it; the chances are learnt (`Chances`). To draft
    nothing is a legal answer.

    A draft that is known as a whole is cut where its value is highest. One that a model makes
    token by token is an optimal stopping problem (`StoppingRule`), which also says what to
    expect of the model before it is run. (The rule for a fixed length is Leviathan et al.'s,
    arXiv:2211.17192, section 3.4; for a tree's nodes, "decode the tree that maximises expected
    tokens per second", Sequoia's, arXiv:2402.12374.)

    What is learnt costs nothing where it can: a proposed token that was not worth verifying is
    compared with the text as it comes. Beyond that a model that does not promise anything is
    tried as often as a small budget allows, and one that loses time against what it promised
    is put aside for a while.

    Beside other sequences a token's plain decode is a part of a batch that all of them share, and
    a drafted row costs what it adds to that batch (`BatchShare`).

    A policy decides for one text. `costs` is the target's table; what is observed goes into it.
    `chances` are by origin; their counts are of all texts and may be shared with other policies.
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
        #: What rows cost in the round's batch.
        self._costs = BatchShare(costs)
        #: What is known of all texts, and the chances in this one; by origin.
        self._known = {} if chances is None else chances
        self._chances: dict[str, Chances] = {}
        #: By drafter, and by what a row costs: that depends on who else is in the round's batch.
        self._rules: dict[tuple[str, int], KnownRule] = {}
        #: Those that hold until anything changes.
        self._in_force: dict[str, StoppingRule] = {}
        self._price = FREE
        self._budget = Budget()
        self._n_stale = 0
        self._n_left = 0
        self._pace = Pace()
        self._has_model_begun = False
        #: What a batch with a draft of each length costs beyond a plain decode, in seconds.
        self._extra_s: list[float] = []
        #: The chances that the draft in the making is accepted up to and with each token.
        self._path: list[float] = []
        #: Whether this round tries a model that promises nothing, and which drafter began.
        self._is_trial = False
        self._began: str | None = None
        self._invested_s = 0.0
        self._outcomes = DraftOutcomes(self._of)
        #: The accounts of the drafters that were asked about in this text.
        self._asked: dict[str, Worths] = {}

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
        if price == FREE:  # what it finds is looked at when it is known
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
        """What it promises to begin with a model whose rounds are worth `value` in this text, as far
        as that shows."""
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
            # Where n-grams draft, as they do in a text that copies, a model adds little.
            horizon=self._horizon() * self._pace.left_by_ngrams,
            elapsed_s=self._budget.elapsed_s,
        )
        return min(worth, 0.0) if self._budget.is_put_aside(origin) else worth

    def _is_too_early(self, origin: str, price: Price) -> bool:
        """Whether a model that has not looked at this text yet may not read it now, whatever it
        promises: nothing else has to be worked out then."""
        chances = self._of(origin)
        worths = chances.counts.worths_at(self._costs.n_sequences)
        if chances.n_looks or worths.start is None:
            return False
        self._asked[origin] = worths
        plain_s, elapsed_s = self._costs.seconds(1), self._budget.elapsed_s
        return not may_read(price, worths, plain_s=plain_s, elapsed_s=elapsed_s)

    def _horizon(self) -> float:
        """The rounds that are left, with caution."""
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
        # What was drawn at random is not dropped for what it says.
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
        """All that was drawn at random, and the nodes of the tree behind it that are worth verifying.
        The draws decide which these are, and are verified in any case: that biases nothing."""
        n_drawn = draft.n_drawn
        origin = draft.origins[n_drawn]
        behind: list[int] = []
        if not self._budget.is_put_aside(origin):
            chances, token_s = self._path_chances(draft)[n_drawn:], self._token_worth_s(origin)
            behind, _ = best_nodes(chances, token_s, self._extra_behind(n_drawn))
        return draft.only([*range(n_drawn), *(n_drawn + node for node in behind)])

    def _look_at(self, tree: GrowingTree) -> None:
        """Work out the chances of the nodes that are new."""
        chances, origin = tree.path_chances, tree.origin
        for node in range(len(chances), len(tree)):
            rank, confidence = tree.ranks[node], tree.probabilities[node]
            if rank == 0:
                self._of(origin).see(confidence)
            before = self._chance_before(tree, tree.parents[node])
            chances.append(before * self._chance_of_guess(origin, rank, confidence))

    def _chance_before(self, tree: GrowingTree, node: int) -> float:
        """The chance that a node, or `ROOT`, is accepted with all that stands before it."""
        if node != ROOT:
            return tree.path_chances[node]
        return self._path[tree.n_before - 1] if tree.n_before else 1.0

    # --- afterwards --------------------------------------------------------------------------

    def observe(self, report: RoundReport) -> None:
        self._in_force.clear()
        self._table.observe(report.n_rows, report.target_s)
        if not self._table:  # a clock that does not tell of the first decode
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
        # What was read in advance serves the rounds to come.
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
        """Remember what a draft that nothing was read for would have been worth verifying: the
        text will tell what that would have saved."""
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
        """What an expected token of a drafter is taken for, in seconds: less than it is worth, as
        long as little was saved in this answer.

        A gain is a matter of chance and a cost is not: at first only what is clearly worth it is
        drafted, so that a short answer, or one that suits no draft, loses little.
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
            chances = self._chances[origin] = known.of_another_text()
        return chances

    def _chance_of(self, draft: Draft) -> float:
        """The chance that a chain is accepted whole; its tokens' chances become the path."""
        chance = 1.0
        for node, (origin, confidence) in enumerate(
            zip(draft.origins, draft.probabilities, strict=True)
        ):
            chance *= self._of(origin).chance(1.0 if confidence is None else confidence)
            self._path[node:] = [chance]
        return chance

    def _path_chances(self, draft: Draft) -> list[float]:
        """The chances that the paths to a draft's nodes are accepted."""
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
        """The chance of a token that its drafter proposed after `rank` others for its place."""
        chance = self._of(origin_of_rank(origin, rank)).chance(confidence)
        return chance if rank == 0 else _SECOND * chance

    def _best(self, draft: Draft) -> tuple[int, float]:
        """The length at which a chain's beginning is worth most, and what it is worth; of a tree
        how many of the nodes."""
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
        """The nodes of a tree that are worth most together, the likeliest first, at so many
        seconds for a token, and what they are worth."""
        if self._budget.is_put_aside(draft.origins[0]):
            return [], 0.0
        return best_nodes(self._path_chances(draft), token_s, self._extra())

    def _extra(self) -> list[float]:
        """What a batch with a draft of each length costs beyond a plain decode, in seconds."""
        if not self._extra_s:
            self._extra_s = [self._extra_for(n) for n in range(self._n_max + 1)]
        return self._extra_s

    def _extra_behind(self, n_before: int) -> list[float]:
        """What a batch costs, for each number of tokens behind a draft of `n_before`, beyond one
        with that draft alone; in seconds."""
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
        """The stopping rule for a drafter at these prices, or a new one if much has changed."""
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
        """Whether a drafter that promises nothing is tried all the same, to learn whether that
        is still so: not if it could not pay even if it were always right."""
        n = min(self._budget.n_tokens, self._n_max)
        cost_s = price.first_s + price.backlog_s + (n - 1) * price.next_s
        cost_s += self._costs.seconds(n + 1) - self._costs.seconds(1)
        return self._budget.allows(cost_s) and self._ideal_s(price) > 0.0

    def _ideal_s(self, price: Price) -> float:
        """Seconds that a round would save with a draft of the best length that is all right."""
        plain_s = self._costs.seconds(1)
        return max(
            k * plain_s
            - (self._costs.seconds(k + 1) - plain_s)
            - price.first_s
            - (k - 1) * price.next_s
            for k in range(1, self._n_max + 1)
        )
