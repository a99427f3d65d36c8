"""How far rows of logits in rounds with drafts are from plain decoding's: a wrong cache moves rows long before it
changes a text."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.measure.verify import movement, plain_rows, plain_texts
from specgen.method.draft import Distribution
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.answer_state import AnswerState
from specgen.text.sampling import Sampler
from specgen.text.text_state import Shaper, TextState


class _Watch(Shaper):
    """A shaper that compares rows with plain decoding's, as long as the text is the same."""

    def __init__(
        self, sampler: Sampler, state: TextState, text: Sequence[int], rows: Sequence[Logits]
    ) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._text, self._rows = list(text), rows
        self.moved_by: list[float] = []

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        answer = [*self._state.tokens[self._n_prompt :], *path]
        if len(answer) < len(self._rows) and answer == self._text[: len(answer)]:
            self.moved_by.append(movement(logits, self._rows[len(answer)]))
        return super().distribution(logits, path)


def moved_rows(session: Session, prompts: Sequence[Prompt], n_at_once: int) -> list[float]:
    """The movements of all rows that greedy answers were chosen from, `n_at_once` made at once."""
    texts = list(plain_texts(session, dict(enumerate(prompts))).values())
    rows = [
        list(plain_rows(session, prompt.tokens, text[:-1]))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    watches: list[_Watch] = []

    def watch(request: Request, sequence: AnswerState) -> None:
        n = request.index
        watches.append(_Watch(session.settings.sampler, sequence.state, texts[n], rows[n]))
        sequence.shaper = watches[-1]

    n_ctx = session.context_size(max(len(prompt.tokens) for prompt in prompts))
    with Engine(session, n_parallel=n_at_once, n_ctx=n_ctx, prepare=watch) as engine:
        for prompt in prompts:
            engine.insert(prompt)
        list(engine.run())
    return [moved for each in watches for moved in each.moved_by]
