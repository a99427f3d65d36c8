"""Drafts in a vocabulary that is not the target's (Timor et al., arXiv:2502.05202, Algorithm 2).

Tokens of both vocabularies stand for bytes. The drafter sees the text in its own tokens
(`DraftText`). The bytes that it drafts are tokenized as the target's tokenizer would do it after
the text so far (`Translation.translate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)

from specgen.drafters.draft_text import DraftText
from specgen.drafters.interface import (
    NO_DRAFT,
    Draft,
    Drafter,
    Drafting,
    Price,
    RoundPlan,
)
from specgen.drafters.lexicon import (
    Lexicon,
    Spelling,
    counterpart,
    n_incomplete_bytes,
)
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import SamplerOptions
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.raw_probabilities import likeliest
from specgen.text.vocabulary import Vocabulary

#: The number of bytes before a draft that the target's tokenizer sees with it, since the tokens of
#: a text depend on what precedes it.
_BYTES_BEFORE = 32
#: The maximum number of tokens at the end of the text that are held back.
_MAX_HELD_BACK = 4


@dataclass(slots=True)
class _DraftedBytes:
    """A chain of the draft's tokens as bytes."""

    #: The bytes of the tokens before the first control token.
    data: bytes = b""
    #: Where each token starts in `data`.
    starts: list[int] = field(default_factory=list)
    #: The probability of each token; None if it is not known.
    probabilities: list[float | None] = field(default_factory=list)
    #: If the chain ends with an end-of-text token: the target's token for it.
    end: int | None = None
    #: The probability of this token, if it is known.
    end_probability: float | None = None

    def probabilities_up_to(
        self,
        ends: Sequence[int],
        offset: int,
    ) -> Iterator[float | None]:
        """Yield the probability of each of the target's tokens that spell `data[offset:]`.

        It is the product of the probabilities of the draft's tokens that start within the target's
        token: 1 if there are none, and None if one of them is not known.

        Example:
            The draft's tokens "a", "b", "c" have the probabilities 0.9, 0.5, 0.8. The target's
            tokens "ab", "c" then have 0.45 and 0.8. If "abc" is one token of the draft, "ab" has
            the probability of "abc", and "c" has 1.

        Args:
            ends: Where the target's tokens end, counted from `offset`.
            offset: Where the target's tokens start in `data`. The draft's tokens that start before
                it count as starting there.
        """
        index = 0
        for end in ends:
            probability: float | None = 1.0
            while index < len(self.starts) and max(0, self.starts[index] - offset) < end:
                factor = self.probabilities[index]
                if probability is not None:
                    probability = None if factor is None else probability * factor
                index += 1
            yield probability


class Translation:
    """Translates between the vocabularies of a target and a draft.

    A translated draft has no distributions, so verifiers can only compare its tokens with those
    that the target chooses.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target = target
        self.draft = draft
        self.draft_lexicon = Lexicon(draft)
        self._target_lexicon = Lexicon(target)

    def text(
        self,
        prompt: Sequence[int],
        draft_prompt: Sequence[int] | None,
    ) -> DraftText:
        """Return the text of an answer in the draft's tokens, so far with the prompt only.

        Args:
            prompt: The target's prompt.
            draft_prompt: The prompt to show to the draft in its place; None translates the
                target's.
        """
        n_prompt = len(prompt)
        if draft_prompt is None:
            # The beginning-of-text token is not translated: each vocabulary has its own, or none.
            n_prompt = 1 if prompt[0] == self.target.special_tokens()["bos"] else 0
            bos = self.draft.special_tokens()["bos"]
            draft_prompt = [bos] if self.draft.add_bos and bos >= 0 else []
        return DraftText(draft_prompt, n_prompt, self.target, self.draft_lexicon)

    def translate(
        self,
        draft: Draft,
        before: bytes,
        held_back: bytes,
        step_confidences: Sequence[float] = (),
    ) -> Draft:
        """Translate a chain into the target's tokens.

        Args:
            draft: A chain in the draft's tokens.
            before: The last bytes of the text before the chain.
            held_back: The end of `before` that was not shown to the draft, so that the chain has to
                begin with it.
            step_confidences: The `step_confidences` of the translated draft.

        Returns:
            The translated chain. It is empty if the chain does not begin with `held_back`, or if
            the target's tokens cannot spell it.
        """
        drafted = self._to_bytes(draft)
        empty_draft = NO_DRAFT
        if step_confidences:
            empty_draft = Draft.chain((), "", step_confidences=step_confidences)
        if not drafted.data.startswith(held_back):
            return empty_draft
        data = drafted.data[len(held_back) :]

        # Leave out an incomplete character at the end: the complete one may be spelled differently.
        # But if the text itself ends within that character, the draft continues it.
        n_incomplete = n_incomplete_bytes(before + data)
        if n_incomplete <= len(data):
            data = data[: len(data) - n_incomplete]

        spelling = self._spell_without_gaps(before, data)
        tokens = [token for token, _ in spelling]
        ends = [end for _, end in spelling]
        probabilities = list(drafted.probabilities_up_to(ends, len(held_back)))
        n_spelled = ends[-1] if ends else 0
        if drafted.end is not None and n_spelled == len(data) and not n_incomplete:
            tokens.append(drafted.end)
            probabilities.append(drafted.end_probability)
        if not tokens:
            return empty_draft
        return Draft.chain(
            tokens,
            draft.origins[0],
            probabilities,
            step_confidences=step_confidences,
        )

    def _to_bytes(self, draft: Draft) -> _DraftedBytes:
        """Return the bytes of a chain up to its first control token, which has none."""
        drafted = _DraftedBytes()
        for token, probability in zip(draft.tokens, draft.probabilities, strict=True):
            data = self.draft.token_bytes(token)
            if not data:
                if self.draft.is_end(token):
                    drafted.end = counterpart(token, self.draft, self.target)
                    drafted.end_probability = probability
                break
            drafted.starts.append(len(drafted.data))
            drafted.probabilities.append(probability)
            drafted.data += data
        return drafted

    def _spell_without_gaps(self, before: bytes, data: bytes) -> Spelling:
        """Spell `data` in the target's tokens, up to the first byte that no token has.

        Args:
            before: The bytes before `data`, on which its tokens depend.
            data: The bytes.
        """
        spelling: Spelling = []
        n_spelled = 0
        for token, end in self._target_lexicon.spell_after(before, data):
            # A token that is shorter than the distance to the previous one follows a gap.
            if end - n_spelled != len(self.target.token_bytes(token)):
                break
            spelling.append((token, end))
            n_spelled = end
        return spelling


class PrefixPipeline(SamplingPipeline):
    """Chooses the draft's most likely tokens, the first of which must begin with given bytes.

    This is needed because the target's text may end within a token of the draft, for example
    between a line break and the indentation of the next line. These last bytes are held back, and
    the draft has to begin with them.

    Args:
        lexicon: Finds the draft's tokens with a prefix.
        excluded: Tokens that are never chosen.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        excluded: Sequence[int] = (),
    ) -> None:
        bias = tuple((token, -math.inf) for token in excluded)
        super().__init__(Sampler(SamplerOptions(logit_bias=bias)), TextState(()))
        self._lexicon = lexicon
        #: The bytes that the draft must begin with; empty for no restriction.
        self.prefix = b""

    def distribution(
        self,
        logits: Logits,
        drafted: Sequence[int] = (),
    ) -> Distribution:
        """Return the draft's choice with certainty: the likeliest token, first with the prefix."""
        if drafted or not self.prefix:
            return super().distribution(logits, drafted)
        token_ids = self._lexicon.with_prefix(self.prefix)
        return Distribution.certain(int(token_ids[logits[token_ids].argmax()]))

    def likeliest(
        self,
        logits: Logits,
        drafted: Sequence[int],
        n: int,
    ) -> tuple[list[int], list[float]]:
        """Return the n likeliest tokens and their probabilities.

        At the first position, these are tokens with the prefix, and probabilities among them.
        """
        if drafted or not self.prefix:
            return super().likeliest(logits, drafted, n)
        token_ids = self._lexicon.with_prefix(self.prefix)
        order, probabilities = likeliest(logits[token_ids], n)
        return token_ids[order].tolist(), probabilities


class TranslatedDrafter(Drafter):
    """Translates between the loop and a drafter with another vocabulary, for one text.

    Args:
        inner: The drafter with the other vocabulary.
        translation: Translates between the vocabularies.
        text: The text in the inner drafter's tokens.
        sampling: The pipeline with which `inner` chooses tokens.
        holds_back: Whether tokens at the end of the text may be held back, so that `inner` may
            choose longer ones. Its cache must be able to drop single cells for that.
    """

    name = "model"

    def __init__(
        self,
        inner: Drafter,
        translation: Translation,
        text: DraftText,
        sampling: PrefixPipeline,
        *,
        holds_back: bool = True,
    ) -> None:
        self.inner = inner
        self.text = text
        self._translation = translation
        self._sampling = sampling
        self._holds_back = holds_back
        #: The last draft, in the inner drafter's tokens.
        self.drafted = NO_DRAFT
        #: The number of tokens of `text` that the inner drafter has seen.
        self._n_seen = 0

    def price(self, n_context: int) -> Price:
        """Return the inner drafter's price; each new token is counted as one of its tokens."""
        n_new = n_context - self.text.n_followed
        return self.inner.price(len(self.text.tokens) + n_new)

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Follow the text, let the inner drafter draft, and translate its draft."""
        text = self.text
        text.follow(context, self.drafted)
        self.drafted = NO_DRAFT
        before = text.last_bytes(_BYTES_BEFORE)
        n_held_back = self._n_to_hold_back(before) if self._holds_back else 0
        if n_held_back:
            text.hold_back(n_held_back)
        if text.n_unchanged < self._n_seen:
            self.inner.rewind(text.n_unchanged)
        self._n_seen = len(text.tokens)
        if not text.tokens:
            return NO_DRAFT

        held_back = text.held_back
        self._sampling.prefix = held_back
        inner_plan = plan
        if n_held_back:  # the draft begins with these tokens again, or with longer ones
            inner_plan = replace(plan, n_max=plan.n_max + n_held_back, n_given=n_held_back)
        self.drafted = yield from self.inner.propose(text.tokens, inner_plan)

        step_confidences = self.drafted.step_confidences[n_held_back:]
        draft = self._translation.translate(self.drafted, before, held_back, step_confidences)
        return draft if len(draft) <= plan.n_max else draft.first(plan.n_max)

    def _n_to_hold_back(self, before: bytes) -> int:
        """Return the number of tokens at the end of the text that the drafter may replace.

        These are the tokens of an incomplete character, or a last token of white space, where
        vocabularies differ most. They are held back only if the draft has longer tokens that begin
        with the same bytes.

        Args:
            before: The last bytes of the text.
        """
        lexicon = self._translation.draft_lexicon
        n_incomplete = n_incomplete_bytes(before)
        for n_tokens in range(1, _MAX_HELD_BACK + 1):
            ending = self.text.ending(n_tokens)
            if len(ending) >= n_incomplete:
                may_go_on = n_incomplete > 0 or ending.isspace()
                # One of the tokens with this prefix may be the prefix itself.
                has_longer = may_go_on and len(lexicon.with_prefix(ending)) > 1
                return n_tokens if has_longer else 0
        return 0
