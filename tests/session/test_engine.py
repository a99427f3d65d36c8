"""Several answers at once, or one after the other with caches that are kept: all are the same as
alone.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.drafters.interface import Drafter, DraftRequest
from specgen.errors import BackendError, ModelFileError, PromptError, UsageError
from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    PromptEvent,
)
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.method import answer_loop
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.prefill_costs import PrefillCosts
from specgen.options import DraftOptions, GenerationOptions, Grammar, SamplerOptions, TreeShape
from specgen.session import scheduler
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine, generate
from specgen.session.measurement_store import MeasurementStore
from specgen.session.prompts import Prompt
from specgen.session.request import Request, Slot
from specgen.session.session import Session
from specgen.text.overlap import common_prefix_length
from tests.helpers.common import EXACT
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language
from tests.helpers.fake_generations import N_VOCAB
from tests.helpers.sessions import answered, answers, finished, folder_with, options_of
from tests.helpers.virtual_time import VirtualTime
from tests.registry import CACHES, ON_TINY
from tests.tiny import TinyConfig

#: Heads would have to be made for each model.
DRAFTERS = sorted({each for each in ON_TINY.values() if each != "heads"})
SAMPLED = SamplerOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0, seed=7)
FIXED = TreeShape("levels", (2, 2, 1))
LONG = "".join(map(chr, range(32, 127)))
PROMPTS = (
    "the cat is in the else",
    LONG + " for with that",
    "the cat is in the house of the",
    "a",
    LONG + " for with it be not self",
    "def f(x):",
)
N_TOKENS = 24
N_CTX = 512


CONFIGS = {
    name: TinyConfig(architecture=architecture, logit_scale=2.0, unprintable_scale=0.0)
    for name, architecture in CACHES.items()
}
models = folder_with(
    **CONFIGS,
    **{f"{name} draft": config.draft(0.1) for name, config in CONFIGS.items()},
    **{f"{name} respelled": config.draft(0.05) for name, config in CONFIGS.items()},
)


def seconds(name: str, n_rows: int) -> float:
    """Rows are cheap, and so are drafts: costs let a model and n-grams draft."""
    own = 0.1 if name.removesuffix(".gguf") in CACHES else 0.01
    return own * (1.0 + 0.03 * (n_rows - 1))


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch, seconds)


def opened(
    models: Path,
    clock: Callable[[], float],
    kind: str = "attention",
    drafter: str = "draft",
    *,
    n_batch: int = 512,
    drafting: Mapping[str, Any] | None = None,
    **more: Any,
) -> Session:
    # A parallel draft is the same file, read with a mask token.
    file, mask = ("draft", "3") if drafter == "parallel" else (drafter, "off")
    options = options_of(
        models / f"{kind}.gguf",
        "ngram" if drafter == "ngram" else f"{kind} {file}",
        n_tokens=N_TOKENS,
        drafting=DraftOptions(ngram_min=1, translate="auto", mask=mask, **(drafting or {})),
        **{"target_context": replace(EXACT, n_batch=n_batch), **more},
    )
    session = Session(options, clock)
    calibrate(session)
    return session


@contextmanager
def engine_of(
    models: Path,
    clock: Callable[[], float],
    n_parallel: int = 1,
    *,
    learn_alone: bool = False,
    **changes: Any,
) -> Iterator[tuple[Session, Engine]]:
    with (
        opened(models, clock, **changes) as loaded,
        Engine(loaded, n_parallel=n_parallel, n_ctx=N_CTX, learn_alone=learn_alone) as engine,
    ):
        yield loaded, engine


def alone(session: Session, prompts: Sequence[str] = PROMPTS, **changes: Any) -> list[str]:
    """The answers without drafts, each in new contexts."""
    options = replace(session.options, draft="none", **changes)
    with Session(options, session.clock, MeasurementStore()) as plain:
        return [answered(plain, prompt, chat=None).text for prompt in prompts]


def check_texts(
    asked: Iterable[tuple[int, Request]],
    expected: Sequence[str],
    broken: Collection[int] = (),
) -> None:
    """Each answer, to a prompt of this number, is whole unless it was cancelled or has failed."""
    for number, answer in asked:
        assert answer.is_done
        if answer.index in broken:
            assert isinstance(answer.failure, BackendError)
        elif answer.is_cancelled:
            assert expected[number].startswith(answer.text)
        else:
            assert answer.text == expected[number]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("n_parallel", [1, 3])
def test_concurrent_answers_are_the_same_as_alone(
    models: Path, costs: VirtualTime, kind: str, drafter: str, n_parallel: int
) -> None:
    with engine_of(models, costs, n_parallel, kind=kind, drafter=drafter) as (loaded, engine):
        expected = alone(loaded)
        asked = [engine.insert(prompt) for prompt in (*PROMPTS, *PROMPTS)]
        kinds = {type(event) for event in engine.run()}
    assert [answer.text for answer in asked] == expected * 2
    assert DraftedEvent in kinds or kind != "attention"


@pytest.mark.parametrize(
    ("tree", "sampler"),  # drawn trees keep no seed's text
    [
        (TreeShape("auto"), SamplerOptions()),
        (TreeShape("auto"), SAMPLED),
        (FIXED, SamplerOptions()),
    ],
)
def test_answers_with_trees_and_seeds_are_the_same_as_alone(
    models: Path, costs: VirtualTime, tree: TreeShape, sampler: SamplerOptions
) -> None:
    with engine_of(models, costs, 4, sampler=sampler, drafting={"tree": tree}) as (loaded, engine):
        expected = alone(loaded)
        assert answers(engine, PROMPTS) == expected
        # And once more, in caches that hold them.
        assert answers(engine, PROMPTS) == expected


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_an_answer_may_do_without_drafts(
    models: Path, costs: VirtualTime, expected: list[str], drafter: str
) -> None:
    """The next answer has drafts again, although the draft's cache lacks the tokens since then."""
    with engine_of(models, costs, 2, drafter=drafter) as (_, engine):
        for wanted in ((True, False), (False, False), (True, True)):
            asked = [engine.insert(PROMPTS[0], draft=drafts) for drafts in wanted]
            begun = [event for event in engine.run() if isinstance(event, PromptEvent)]
            drafted = {event.sequence: event.draft != "none" for event in begun}
            for answer, drafts in zip(asked, wanted, strict=True):
                assert answer.text == expected[0]
                assert answer.finished is not None
                assert (answer.finished.n_drafted > 0) == drafted[answer.index] == drafts


def test_each_answer_has_its_own_samplers_and_grammar(models: Path, costs: VirtualTime) -> None:
    """Greedy, sampled and constrained answers share batches, and each is as it is alone."""
    grammar = Grammar("gbnf", 'root ::= ("the " | "else ")+')
    free = GenerationOptions(max_tokens=N_TOKENS)
    asked_for = [
        (SamplerOptions(), free),
        (SAMPLED, free),
        (replace(SAMPLED, temperature=2.0, seed=11), free),
        (SamplerOptions(repeat_penalty=1.8), free),
        (SamplerOptions(), replace(free, grammar=grammar)),
    ]
    with engine_of(models, costs, 3) as (loaded, engine):
        expected, asked = [], []
        for sampling, generation in asked_for:
            expected += alone(loaded, PROMPTS[:1], sampler=sampling, generation=generation)
            asked.append(engine.insert(PROMPTS[0], sampling=sampling, generation=generation))
        assert len(set(expected)) == len(expected)
        list(engine.run())
        wrong = GenerationOptions(grammar=Grammar("gbnf", "root = x"))
        with pytest.raises(UsageError, match="grammar"):
            engine.insert(PROMPTS[0], generation=wrong)
        with pytest.raises(UsageError, match="no token 5000"):
            engine.insert(PROMPTS[0], sampling=SamplerOptions(logit_bias=((5000, 1.0),)))
        assert engine.is_idle
    assert [answer.text for answer in asked] == expected
    assert all(answer.finished.n_drafted for answer in asked if answer.finished)


# --- prefixes in caches


@pytest.mark.parametrize("kind", CACHES)
def test_a_conversation_decodes_only_what_is_new(
    models: Path, costs: VirtualTime, kind: str
) -> None:
    with engine_of(models, costs, 2, kind=kind) as (loaded, engine):
        prompt = loaded.prompts.of_text(LONG)
        more = loaded.prompts.of_text(" and so on").tokens
        for turn in range(4):
            backends = (engine.target, *engine.draft_caches)
            n_before = [backend.n_decoded_rows for backend in backends]
            answer = engine.insert(prompt)
            list(engine.run())
            n_rows = [b.n_decoded_rows - n for b, n in zip(backends, n_before, strict=True)]
            assert answer.text == finished(list(generate(loaded, prompt))).text
            assert answer.finished is not None
            n_prompt = len(prompt.tokens)
            if turn:
                # All but the last token of the answer, which nobody decoded, and what is new.
                assert n_prompt - answer.finished.n_cached_tokens <= 1 + len(more)
                assert max(n_rows) < n_prompt
            tokens = (*prompt.tokens, *answer.finished.token_ids, *more)
            prompt = Prompt("", tokens)


def test_a_slot_whose_text_is_continued_is_preferred(models: Path, costs: VirtualTime) -> None:
    with engine_of(models, costs, 2) as (_, engine):
        (first,) = answers(engine, [LONG])
        answers(engine, ["other things"])
        held = [slot.branches(engine.target).first for slot in engine.slots]
        assert all(engine.target.length(each) > 0 for each in held)
        asked = [engine.insert(text) for text in (LONG + first + " and", "other things")]
        again, other = (finished(list(engine.stream(request))) for request in asked)
        assert again.n_cached_tokens > len(LONG)
        # The other text is still there.
        assert other.n_cached_tokens == other.n_prompt_tokens - 1


def decode_alone(engine: Engine, prompt: str | Prompt) -> FinishedEvent:
    return finished(list(engine.stream(engine.insert(prompt))))


def test_a_changed_conversation_stays_in_its_slot(models: Path, costs: VirtualTime) -> None:
    with engine_of(models, costs, 2) as (loaded, engine):
        other = decode_alone(engine, LONG[::-1])
        for answer in ("is", "be", "not"):
            prompt = loaded.prompts.of_text(f"{LONG} {answer} and")
            decode_alone(engine, replace(prompt, subject="a question"))
        again = decode_alone(engine, LONG[::-1])
    assert again.token_ids == other.token_ids
    assert again.n_cached_tokens == again.n_prompt_tokens - 1


def test_short_texts_make_room_before_long_ones(models: Path, costs: VirtualTime) -> None:
    with engine_of(models, costs, 2) as (_, engine):
        decode_alone(engine, LONG)
        for text in ("a", "self", "not"):
            decode_alone(engine, text)
        again = decode_alone(engine, LONG)
        assert again.n_cached_tokens == again.n_prompt_tokens - 1
        # But a long text that is never used again is dropped in the end.
        for number in range(20):
            decode_alone(engine, f"{number} the cat is in the house of the else")
        assert decode_alone(engine, LONG).n_cached_tokens < len(LONG) // 2


def test_a_slot_whose_prefix_cannot_be_reused_is_left_alone(
    models: Path, costs: VirtualTime
) -> None:
    with engine_of(models, costs, 2, kind="recurrent") as (loaded, engine):
        prompt = loaded.prompts.of_text(LONG)
        first = decode_alone(engine, prompt)
        decode_alone(engine, f"{LONG[:60]} of the else")
        continued = Prompt("", (*prompt.tokens, *first.token_ids, *prompt.tokens[-3:]))
        again = decode_alone(engine, continued)
    assert again.n_cached_tokens >= len(prompt.tokens)


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=2, max_size=12),
    n_slots=st.integers(1, 4),
    data=st.data(),
)
def test_a_slot_holds_the_prefix_of_its_text_and_nothing_else(
    texts: list[list[int]], n_slots: int, data: st.DataObject
) -> None:
    language, letters = random_language(N_VOCAB, seed=1), FakeVocabulary.letters(N_VOCAB)
    backend = FakeBackend(letters, language, n_ctx=100, n_sequences=2 * n_slots)
    for text in texts:
        slots = [Slot(number, n_slots) for number in range(n_slots)]
        slot = slots[data.draw(st.integers(0, n_slots - 1))]
        own = slot.branches(backend)
        held = [backend.text(each.branches(backend).first) for each in slots]
        n = slot.share_prefix(backend, text)
        assert n == max(common_prefix_length(other, text[:-1]) for other in held)
        assert list(backend.text(own.first)) == text[:n]
        for each, before in zip(slots, held, strict=True):
            if each is not slot:
                assert backend.text(each.branches(backend).first) == before
        batch = Batch()
        for position in range(n, len(text)):
            batch.add(text[position], position, (own.first,), position == len(text) - 1)
        (row,) = backend.decode(batch)
        assert row.tolist() == language(tuple(text)).tolist()


# --- coming and going


@pytest.fixture(scope="module")
def expected(models: Path) -> list[str]:
    with opened(models, lambda: 0.0, drafter="ngram") as loaded:
        return alone(loaded)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["submit", "cancel", "step", "break"]), st.integers(0, 17)),
        max_size=24,
    ),
    n_parallel=st.integers(1, 4),
    drafter=st.sampled_from(["draft", "ngram"]),
)
def test_answers_may_be_added_and_cancelled_at_any_time(
    models: Path, expected: list[str], acts: list[tuple[str, int]], n_parallel: int, drafter: str
) -> None:
    asked: list[tuple[int, Request]] = []
    broken: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        clock = VirtualTime(patch, seconds)
        with engine_of(models, clock, n_parallel, drafter=drafter) as (_, engine):
            for act, number in acts:
                if act == "submit":
                    asked.append((number % 6, engine.insert(PROMPTS[number % 6])))
                elif act == "cancel" and asked:
                    engine.cancel(asked[number % len(asked)][1])
                elif act == "step":
                    for _ in range(1 + number % 6):
                        engine.step()
                elif act == "break":
                    broken |= break_round(engine)
            list(engine.run())
    check_texts(asked, expected, broken)


def break_round(engine: Engine) -> set[int]:
    """Let the next round fail; returns which answers were in it."""
    busy: set[int] = set()
    whole = AnswerLoop.round

    def fail(_backend: LlamaBackend, _batch: Batch) -> None:
        raise BackendError("no room in the cache")

    def broken(
        loop: AnswerLoop, sequences: Sequence[AnswerState], decode: Any = None
    ) -> list[Event]:
        # A prompt that is read in the batch of the round fails with it.
        read = [] if decode is None else [decode.args[0]]
        is_run = any(not sequence.is_finished for sequence in sequences)
        busy.update(each.index for each in (*sequences, *read) if is_run and not each.is_finished)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(engine.target), "decode", fail)
            return whole(loop, sequences, decode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerLoop, "round", broken)
        try:
            engine.step()
        except BackendError:
            assert busy
        else:
            assert not busy
    return busy


def test_answers_can_be_requested_and_cancelled_from_other_threads(
    models: Path, costs: VirtualTime, expected: list[str]
) -> None:
    asked: list[tuple[int, Request]] = []
    with engine_of(models, costs, 3, drafter="ngram") as (loaded, engine):
        prompts = [loaded.prompts.of_text(prompt) for prompt in PROMPTS]

        def ask(first: int) -> None:
            for number in range(first, first + 8):
                answer = engine.insert(prompts[number % len(prompts)])
                asked.append((number % len(prompts), answer))
                if number % 5 == 0:
                    engine.cancel(answer)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or not engine.is_idle:
            engine.step()
        for thread in threads:
            thread.join()
    assert sorted(answer.index for _, answer in asked) == list(range(32))
    check_texts(asked, expected)


def test_the_garbage_collector_may_cancel_an_answer_while_another_is_queued(
    models: Path, costs: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes an iterator that is part of a cycle, and must not wait for the queue's lock."""

    def collecting(*arguments: Any) -> Request:
        gc.collect()
        return Request(*arguments)

    with engine_of(models, costs, drafter="ngram") as (_, engine):
        abandoned = engine.insert(PROMPTS[0])
        cycle: list[Any] = [engine.stream(abandoned)]
        cycle.append(cycle)
        del cycle
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "Request", collecting)
            answer = engine.insert(PROMPTS[1])
        assert abandoned.is_cancelled
        list(engine.run())
        assert answer.text


@pytest.mark.parametrize("n_tokens", [1, 5, 9])
def test_a_cancelled_answer_has_the_text_that_was_held_back(
    models: Path, costs: VirtualTime, expected: list[str], n_tokens: int
) -> None:
    """The whole text so far might have become a stop string."""
    options = GenerationOptions(max_tokens=N_TOKENS, stop=(expected[0] + "?",))
    with engine_of(models, costs, drafter="ngram") as (loaded, engine):
        request = engine.insert(PROMPTS[0], generation=options)
        while request.answer is None or request.answer.n_answer < n_tokens:
            engine.step()
        engine.cancel(request)
        events = list(engine.stream(request))
        summary = finished(events)
        pieces = map(loaded.target.vocabulary.token_bytes, summary.token_ids)
        text = b"".join(pieces).decode()
    shown = "".join(event.text for event in events if isinstance(event, CommittedEvent))
    assert summary.finish_reason == "interrupted"
    assert summary.text == shown == text


def test_answers_are_the_same_after_a_draft_that_could_branch_cannot_be_loaded_again(
    models: Path, costs: VirtualTime, expected: list[str]
) -> None:
    """The slots stay where they are in the target's cache."""
    with engine_of(models, costs, 3) as (loaded, engine):
        assert loaded.n_branches_max > 1
        assert answers(engine, PROMPTS) == expected
        loaded.draft_source = models / "missing.gguf"
        with pytest.raises(ModelFileError, match="no such file"):
            engine.reload_draft()
        for _ in range(2):
            assert answers(engine, PROMPTS) == expected


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_a_draft_that_cannot_begin_an_answer_ends_drafting_but_not_the_answer(
    models: Path,
    costs: VirtualTime,
    expected: list[str],
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_request: DraftRequest) -> Drafter:
        raise KeyError("a bug")

    with engine_of(models, costs, 2, drafter=drafter) as (loaded, engine):
        assert loaded.draft is not None
        monkeypatch.setattr(loaded.draft, "drafter", broken)
        requests = [engine.insert(prompt) for prompt in PROMPTS[:3]]
        events = list(engine.run())
        assert [request.text for request in requests] == expected[:3]
    notices = [event for event in events if isinstance(event, NoticeEvent)]
    assert [notice.sequence for notice in notices] == [0, 1, 2]
    assert all("drafting failed" in notice.message for notice in notices)
    assert all("broken" in str(notice.detail) for notice in notices)


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_every_draft_may_keep_finished_texts(
    models: Path, costs: VirtualTime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Sequence[int]] = []
    with engine_of(models, costs, drafter=drafter) as (loaded, engine):
        monkeypatch.setattr(loaded.draft, "keep_text", kept.append)
        requests = [engine.insert(prompt) for prompt in PROMPTS[:2]]
        list(engine.run())
    assert len(kept) == 2
    for text, request in zip(kept, requests, strict=True):
        assert request.finished is not None
        n_prompt = len(request.prompt.tokens)
        assert tuple(text[:n_prompt]) == request.prompt.tokens
        assert tuple(text[n_prompt:])[: request.finished.n_tokens] == request.finished.token_ids


def test_a_draft_that_cannot_keep_a_text_does_not_fail_the_answer(
    models: Path, costs: VirtualTime, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_tokens: Sequence[int]) -> None:
        raise KeyError("a bug")

    with engine_of(models, costs) as (loaded, engine):
        monkeypatch.setattr(loaded.draft, "keep_text", broken)
        request = engine.insert(PROMPTS[0])
        events = list(engine.run())
    assert request.text == expected[0]
    (notice,) = (event for event in events if isinstance(event, NoticeEvent))
    assert "KeyError('a bug')" in notice.message


def test_impossible_requests_are_rejected(models: Path, costs: VirtualTime) -> None:
    with engine_of(models, costs) as (loaded, engine):
        wrong: Any = ((0, "give 1 or more"), (2.5, "whole number"), (257, "at once"))
        for n_parallel, said in wrong:
            with pytest.raises(UsageError, match=said):
                Engine(loaded, n_parallel=n_parallel)
        with pytest.raises(PromptError, match="the context has 512"):
            engine.insert("x " * 800)
        assert engine.is_idle
        assert engine.step() == []
        answer = engine.insert("a")
        with pytest.raises(RuntimeError, match="answer 0 is not done"):
            _ = answer.text
    with pytest.raises(BackendError, match="the engine is closed"):
        _ = answer.text


@pytest.mark.parametrize(
    ("kind", "knows_costs"), [*((kind, True) for kind in CACHES), ("attention", False)]
)
def test_an_answer_continues_during_the_prefill_of_a_long_prompt(
    models: Path, costs: VirtualTime, kind: str, knows_costs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is prefilled between the rounds, or in their batches: then the answer keeps half
    of its speed.
    """
    monkeypatch.setattr(scheduler, "N_PREFILL_ALONGSIDE", 8)
    monkeypatch.setattr(LlamaModel, "has_equal_rows", True)
    drafting = {} if knows_costs else {"policy": "fixed"}
    with engine_of(models, costs, 2, kind=kind, drafting=drafting) as (loaded, engine):
        first = engine.insert(PROMPTS[0], draft=False)
        for _ in range(4):
            engine.step()
        second = engine.insert(PROMPTS[1])
        n_said, times = [], []
        while not any(isinstance(event, CommittedEvent) for event in second.events):
            times.append(costs())
            engine.step()
            n_said.append(sum(isinstance(e, CommittedEvent) for e in first.events))
        list(engine.run())
        assert [first.text, second.text] == alone(loaded, PROMPTS[:2])
    assert len(set(n_said)) >= 3, "the prompt is read in pieces, between which the answer goes on"
    if kind == "attention" and knows_costs:
        step_s = [after - before for before, after in itertools.pairwise(times)]
        assert max(step_s) <= 2.01 * 0.1, "a round takes 0.1 s alone"


def test_a_short_prompt_does_not_wait_for_a_long_one(models: Path, costs: VirtualTime) -> None:
    """Prompts take turns: the shortest first, then the oldest. A prompt that shares a prefix with
    another one waits until that prefix is decoded, and does not decode it again.
    """
    long = "0123456789 is not the cat " * 6
    shorts = [f"{letter} cat" for letter in "abcd"]
    with engine_of(models, costs, 7, drafter="ngram", n_batch=8) as (loaded, engine):
        expected = alone(loaded, (long, *shorts, long + "house"))
        first = engine.insert(long)
        engine.step()
        asked = [engine.insert(prompt) for prompt in (*shorts, long + "house")]
        steps: dict[int, int] = {}
        for step in range(1000):
            for event in engine.step():
                if isinstance(event, CommittedEvent):
                    steps.setdefault(event.sequence, step)
        *brief, alike = asked
        assert [first.text, *(each.text for each in asked)] == expected
    n_pieces = -(-len(first.prompt.tokens) // 8)
    assert n_pieces > 12
    for number, short in enumerate(brief):  # waits for one piece of the long one
        assert steps[short.index] <= 2 * number + 2
    # The long one is read meanwhile, at least a token in each step.
    assert n_pieces - 2 <= steps[first.index] <= len(first.prompt.tokens)
    assert alike.finished is not None
    assert alike.finished.n_cached_tokens >= len(first.prompt.tokens) - 40


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_cancelled_prefill_ends_in_the_middle_of_a_part(
    models: Path, costs: VirtualTime, kind: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is free at once, others continue, and the prompt gets the same answer next time."""
    monkeypatch.setattr(answer_loop, "N_PREFILL_ALONGSIDE", 4)
    decode, unwanted = llama_cpp.llama_decode, list[Request]()

    def cancelling(*arguments: Any) -> int:
        for request in unwanted:
            engine.cancel(request)
        return int(decode(*arguments))

    with engine_of(models, costs, 2, kind=kind, drafter=drafter, n_batch=8) as (loaded, engine):
        expected = alone(loaded, PROMPTS[:2])
        other = engine.insert(PROMPTS[0])
        engine.step()
        for n_pieces in (1, 3):
            request = engine.insert(PROMPTS[1])
            for _ in range(n_pieces):
                engine.step()
            n_read = request.running.n_prefilled
            unwanted.append(request)
            with monkeypatch.context() as patch:
                patch.setattr(llama_cpp, "llama_decode", cancelling)
                while not request.is_done:
                    engine.step()
            assert request.finished is not None
            assert request.finished.finish_reason == "interrupted"
            assert request.slot is None
            assert n_read < len(request.prompt.tokens)
        again = engine.insert(PROMPTS[1])
        list(engine.run())
        assert [other.text, again.text] == expected


@pytest.mark.parametrize("has_equal_rows", [True, False])
def test_prefill_chunks_are_short_while_others_may_wait(
    models: Path, costs: VirtualTime, has_equal_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.3 s. If rows depend on the batch, chunks are as large as for a single answer."""
    monkeypatch.setattr(LlamaModel, "has_equal_rows", has_equal_rows)
    monkeypatch.setattr(scheduler, "N_PREFILL_ALONGSIDE", 8)
    with engine_of(models, costs, 2, drafter="ngram", n_batch=128) as (loaded, engine):
        prompts = ["1234567890 the cat" * 20, "is 0987654321 not" * 20]
        expected = alone(loaded, prompts)
        asked = [engine.insert(prompt) for prompt in prompts]
        times = [costs()]
        while not any(request.state == "decoding" for request in asked):
            engine.step()
            times.append(costs())
        list(engine.run())
        assert [request.text for request in asked] == expected
    step_s = [after - before for before, after in itertools.pairwise(times)][1:-1]
    assert (max(step_s) < 0.36) == has_equal_rows


def test_the_cost_of_a_prefill_grows_along_the_prompt() -> None:
    """A chunk at the beginning gives a rough estimate of the whole prefill, and chunks at several
    positions give the exact time.
    """
    costs = PrefillCosts()
    assert costs.seconds(0, 100) == 0.0
    for n_read, tolerance in ((512, 0.35), (8192, 0.01)):
        for start in range(0, n_read, 512):
            costs.observe(start, 512, 512 * 2e-3 + 2e-7 * ((start + 512) ** 2 - start**2))
        expected_s = 10_000 * 2e-3 + 2e-7 * (20_000**2 - 10_000**2)
        assert costs.seconds(10_000, 20_000) == pytest.approx(expected_s, rel=tolerance)


def test_an_answer_may_ask_for_shorter_drafts(models: Path, costs: VirtualTime) -> None:
    with engine_of(models, costs) as (_, engine):
        asked = [engine.insert(PROMPTS[0], n_drafted_max=n) for n in (None, 2, 0)]
        list(engine.run())
        free, short, none = (
            [len(event.nodes) for event in answer.events if isinstance(event, DraftedEvent)]
            for answer in asked
        )
        assert max(free) > 2 >= max(short)
        assert not none
        assert len({answer.text for answer in asked}) == 1
    with engine_of(models, costs, drafting={"tree": FIXED}) as (_, engine):  # noqa: SIM117
        with pytest.raises(UsageError, match="fixed shape 2,2,1"):
            engine.insert(PROMPTS[0], n_drafted_max=2)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_answers_drafts_do_not_depend_on_earlier_answers(
    models: Path, costs: VirtualTime, drafter: str
) -> None:
    """What is drafted for an answer is the same after any other answer."""

    def drafts(before: tuple[str, ...], *, learn_alone: bool) -> list[object]:
        with engine_of(models, costs, drafter=drafter, learn_alone=learn_alone) as (_, engine):
            answers(engine, before)
            events = list(engine.stream(engine.insert(PROMPTS[1])))
        return [event.nodes for event in events if isinstance(event, DraftedEvent)]

    # No earlier prompt begins like the one that is compared: a shared prefix in the cache may
    # show. So may the costs of decodes, which are known after some of them.
    few, many = (PROMPTS[0],) * 4, (PROMPTS[0], PROMPTS[3], PROMPTS[5]) * 4
    expected = drafts(few, learn_alone=True)
    assert expected
    assert expected == drafts(many, learn_alone=True)
    assert expected != drafts(many, learn_alone=False)
