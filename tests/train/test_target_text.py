"""The target's own text, and heads that are trained on it, with tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from specgen.errors import ModelFileError, OutputError, UsageError
from specgen.method.backend import Batch
from specgen.method.cost_table import CostTable
from specgen.session.engine import generate
from specgen.session.session import Session
from specgen.system.files import locked
from specgen.train.draft_builder import plan_time
from specgen.train.target_text import N_TOP, TargetText, is_held_back
from specgen.train.training_loop import TextOptions
from tests.helpers.heads import N_ANSWER, opened, prompts, written
from tests.tiny import TinyConfig, write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "t.gguf", TinyConfig(logit_scale=6))


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    with opened(target) as loaded:
        assert written(loaded, folder, prompts(20), 10**6) == 20 * N_ANSWER
    return folder


def rows_of(session: Session, tokens: list[int], n_before: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of a text's last rows, decoded in one batch."""
    with session.contexts(512, drafts=False) as (backend, _):
        before = tokens[:n_before]
        backend.decode(Batch(before, list(range(n_before)), [(0,)] * n_before, [False] * n_before))
        logits, hidden = [], []
        for position in range(n_before, len(tokens)):
            batch = Batch([tokens[position]], [position], [(0,)], [True])
            found = backend.decode_hidden(batch)
            logits.append(found[0][0].copy())
            hidden.append(found[1][0].copy())
    return np.array(logits), np.array(hidden)


def test_answers_have_the_hidden_states_and_the_likeliest_tokens_of_the_target(
    target: Path, folder: Path
) -> None:
    text = TargetText(folder)
    held_back = {answer.prompt: answer.is_held_back for answer in text.answers}
    assert held_back == {prompt: is_held_back(i) for i, prompt in enumerate(prompts(20))}
    assert len(text.answers) == 20
    with opened(target) as loaded:
        for index in (0, 13):
            answer = text.answers[index]
            prompt = loaded.prompts.of_text(answer.prompt)
            assert answer.prompt_tokens == prompt.tokens
            *_, last = generate(loaded, prompt)
            assert getattr(last, "token_ids", ()) == answer.tokens
            n = len(prompt.tokens)
            tokens = [*prompt.tokens, *answer.tokens]
            logits, hidden = rows_of(loaded, tokens[:-1], n - 1)
            np.testing.assert_allclose(text.hidden(index), hidden, atol=0.02, rtol=0.01)
            likeliest, probabilities = text.top(index)
            assert likeliest.shape == probabilities.shape == (N_ANSWER, N_TOP)
            assert (likeliest[:, 0] == logits.argmax(axis=1)).all()
            exact = np.exp(logits - logits.max(axis=1, keepdims=True))
            exact /= exact.sum(axis=1, keepdims=True)
            expected = np.take_along_axis(exact, likeliest.astype(np.int64), axis=1)
            np.testing.assert_allclose(probabilities, expected, atol=0.01)
            assert (np.diff(expected, axis=1) <= 1e-6).all()


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_existing_answers_are_not_made_again(target: Path, folder: Path, copy: Path) -> None:
    """Answers to other prompts stay, but do not count."""
    own = [*prompts(23)[20:], prompts(20)[13]]
    with opened(target) as loaded:
        assert written(loaded, copy, prompts(20), 10) == 20 * N_ANSWER
        assert written(loaded, copy, own, 4 * N_ANSWER) == 4 * N_ANSWER
    whole = TargetText(folder)
    again = TargetText(copy)
    mine = TargetText(copy, own)
    assert again.answers[:20] == whole.answers
    assert (again.hidden(19) == whole.hidden(19)).all()
    at = [each.prompt for each in whole.answers].index(own[-1])
    assert mine.answers == [whole.answers[at], *again.answers[20:]]
    assert whole.answers[0].is_held_back, "of ten prompts, the one for judging comes first"
    assert sorted(answer.prompt for answer in mine.answers) == sorted(own)
    assert (mine.hidden(0) == whole.hidden(at)).all()
    assert (mine.top(0)[0] == whole.top(at)[0]).all()


def test_the_present_list_of_prompts_decides_which_are_held_back(folder: Path) -> None:
    """Drafts are compared on the prompts that it holds back, whoever answered them before."""
    present = prompts(25)[3:]
    held_back = {each.prompt for each in TargetText(folder, present).answers if each.is_held_back}
    assert held_back == {prompts(25)[12]}  # the tenth; the twentieth has no answer yet
    as_written = {each.prompt for each in TargetText(folder).answers if each.is_held_back}
    assert as_written == {prompts(25)[9], prompts(25)[19]}


def test_a_damaged_answer_is_reported_and_made_again(
    target: Path, folder: Path, copy: Path
) -> None:
    damaged = sorted(copy.glob("*.npz"))[3]
    damaged.write_bytes(damaged.read_bytes()[:-700])
    with pytest.raises(ModelFileError, match="not a stored answer") as raised:
        TargetText(copy)
    assert raised.value.hint == f"delete {damaged}: it will be generated again"
    damaged.unlink()
    with opened(target) as loaded:
        written(loaded, copy, prompts(20), 10**6)
    assert TargetText(copy).answers[-1] == TargetText(folder).answers[3]


@pytest.mark.parametrize(
    ("offset", "value"),
    [(6, 99), (8, 1), (10, 99)],
    ids=["of a later version", "encrypted", "compressed in an unknown way"],
)
def test_a_single_wrong_byte_is_reported(copy: Path, offset: int, value: int) -> None:
    """The first array in the archive seems to be stored in another way."""
    damaged = min(copy.glob("*.npz"))
    content = bytearray(damaged.read_bytes())
    content[content.index(b"PK\1\2") + offset] = value
    damaged.write_bytes(content)
    with pytest.raises(ModelFileError, match="not a stored answer"):
        TargetText(copy)


def test_prompts_that_are_too_long_are_left_out_each_time(tmp_path: Path) -> None:
    """All prompts that are left for a second command are too long."""
    config = TinyConfig(logit_scale=6, n_ctx_train=256)
    short = prompts(20)
    few_long = [*short, "a b " * 150]
    more_long = [*short, *("a b " * n for n in range(150, 160))]
    with opened(write_tiny_model(tmp_path / "t.gguf", config)) as loaded:
        for folder, texts in (("few", few_long), ("more", more_long)):
            for _ in range(2):
                assert written(loaded, tmp_path / folder, texts, 10**6) == 20 * N_ANSWER
            assert {each.prompt for each in TargetText(tmp_path / folder).answers} == set(short)
        with pytest.raises(UsageError, match="do not fit into the target's context of 256"):
            written(loaded, tmp_path / "none", more_long[20:])


def test_one_process_writes_at_a_time(target: Path, tmp_path: Path) -> None:
    held = OutputError("held")
    with (
        opened(target) as loaded,
        locked(tmp_path / "lock", held),
        pytest.raises(OutputError, match="another process is writing there"),
    ):
        written(loaded, tmp_path, prompts(1))


@pytest.mark.parametrize(("minutes", "n_judged"), [(1.0, 2), (3.0, 4), (30.0, 8)])
def test_the_minutes_include_the_comparison_of_drafts(minutes: float, n_judged: int) -> None:
    costs = CostTable({1: 0.05, 16: 0.1})
    plan = plan_time(60.0 * minutes, costs, 4, TextOptions([]), 0)
    assert plan.n_judged == n_judged
    assert plan.text_s + plan.training_s + plan.judging_s == pytest.approx(60.0 * minutes)
    assert plan.n_tokens == int(plan.text_s / (3 * 0.1 / 16))


def test_time_goes_first_to_the_least_text_and_what_cannot_fit_is_known() -> None:
    costs = CostTable({1: 0.05, 16: 0.1})
    options = TextOptions([])
    usual, short = (plan_time(s, costs, 2, options, 5000) for s in (600.0, 200.0))
    assert usual.text_s == pytest.approx(0.6 * (600.0 - usual.judging_s))
    assert short.n_tokens > 5000
    assert short.text_s > 0.6 * (200.0 - short.judging_s)
    assert short.n_judged < usual.n_judged
    assert short.needed_s < 200.0
    assert plan_time(90.0, costs, 2, options, 5000).needed_s > 90.0
