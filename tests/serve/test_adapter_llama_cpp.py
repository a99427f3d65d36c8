"""specgen's drafts in llama-cpp-python's `Llama`: the texts are the same as without a draft."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from llama_cpp import Llama

from specgen.errors import PairError, UsageError
from specgen.options import DraftOptions, TreeShape
from specgen.serve.adapters import llama_cpp as adapter
from specgen.serve.adapters.llama_cpp import SpecgenDraft
from specgen.system.folders import measurements_file
from tests.helpers.sessions import folder_with
from tests.tiny import TinyConfig, write_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
TARGET = TinyConfig(logit_scale=6.0, unprintable_scale=0.3)
FIXED = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0)
N_CTX = 256
PROMPTS = (
    "the cat is in the",
    "a b c d a b c d a b",
    "the cat is in the house of the",
    "",
    "the cat is in the",
    "not the cat " * 14,
    "the",
)


models = folder_with(
    target=TARGET,
    good=TARGET.draft(0.02),
    wrong=TARGET.draft(1.5),
    respelled=TARGET,
    **{"more tokens": replace(TARGET, n_vocab=400)},
)


@contextlib.contextmanager
def opened_llama(path: Path, draft: SpecgenDraft | None = None, **options: Any) -> Iterator[Llama]:
    options = {"n_ctx": N_CTX, "n_batch": 64, "logits_all": draft is not None, **options}
    llama = Llama(
        str(path), draft_model=draft, n_threads=1, n_threads_batch=1, verbose=False, **options
    )
    with contextlib.closing(llama):
        yield llama


def text(llama: Llama, prompt: str, **options: Any) -> str:
    answer = llama(prompt, **{"max_tokens": 40, "temperature": 0.0, **options})
    assert isinstance(answer, dict)
    return answer["choices"][0]["text"]


def check_texts(
    models: Path, draft: str, drafting: DraftOptions, **options: Any
) -> tuple[int, float]:
    """Check that all texts are those without a draft; return how many tokens were drafted, and the
    share that was accepted. Of several drafts, between commas, each drafts for the one before it.
    """
    names = draft.split(", ")
    files = [name if name == "ngram" else str(models / f"{name}.gguf") for name in names]
    target = models / "target.gguf"
    with opened_llama(target) as llama:
        plain = [text(llama, prompt, **options) for prompt in PROMPTS]
    with (
        SpecgenDraft(target, files, n_ctx=N_CTX, drafting=drafting) as specgen_draft,
        opened_llama(target, specgen_draft) as llama,
    ):
        specgen_draft.check(llama)
        assert [text(llama, prompt, **options) for prompt in PROMPTS] == plain
        llama.reset()  # type: ignore[no-untyped-call]
        assert text(llama, PROMPTS[0], **options) == plain[0]
        tally = specgen_draft.tally
        return tally.n_drafted, tally.n_accepted / max(1, tally.n_drafted)


@pytest.mark.parametrize(
    ("draft", "drafting"),
    [
        ("good", FIXED),
        ("respelled", FIXED),
        ("ngram", replace(FIXED, ngram_min=1)),
        ("good, wrong", FIXED),
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 11}])
def test_texts_are_those_without_a_draft(
    models: Path, draft: str, drafting: DraftOptions, sampling: dict[str, Any]
) -> None:
    """Several prompts, some with a common prefix, one empty, one of several batches."""
    n_drafted, rate = check_texts(models, draft, drafting, **sampling)
    assert n_drafted > 40
    # Random text has hardly any of the phrases that n-grams also draft.
    assert rate > (0.0 if sampling else 0.01 if draft == "ngram" else 0.5)


def test_by_cost_the_models_are_timed_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_texts(models, "good", DraftOptions())
    assert '"costs"' in measurements_file().read_text(encoding="utf-8")
    monkeypatch.setattr(adapter, "calibrate", None)
    check_texts(models, "good", DraftOptions())


def test_the_pages_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = replace(TARGET, n_ctx_train=2048)
    write_tiny_model(tmp_path / "target.gguf", target)
    write_tiny_model(tmp_path / "draft.gguf", target.draft(0.02))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert re.search(r"\d+ of \d+ drafted tokens accepted", capsys.readouterr().out)


def test_a_draft_that_cannot_be_used_is_a_clear_error(models: Path, tmp_path: Path) -> None:
    target = models / "target.gguf"
    recurrent = write_tiny_model(tmp_path / "r.gguf", TinyConfig(architecture="mamba"))
    with pytest.raises(UsageError, match=r"r\.gguf has a recurrent state"):
        SpecgenDraft(recurrent, "ngram")
    with pytest.raises(UsageError, match="Llama verifies chains only"):
        SpecgenDraft(target, "ngram", drafting=DraftOptions(tree=TreeShape("levels", (2, 2))))
    with pytest.raises(UsageError, match="no draft is given"):
        SpecgenDraft(target, [])
    with pytest.raises(PairError):
        SpecgenDraft(target, models / "respelled.gguf", drafting=DraftOptions(translate="off"))


def test_a_llama_without_space_for_logits_is_an_error_before_it_fails(models: Path) -> None:
    target = models / "target.gguf"
    with (
        SpecgenDraft(target, "ngram", drafting=FIXED) as draft,
        opened_llama(target, draft, logits_all=False) as llama,
        pytest.raises(UsageError, match="logits of 64 tokens.*context of 256") as raised,
    ):
        draft.check(llama)
    assert "logits_all=True" in str(raised.value.hint)
    with (
        SpecgenDraft(target, "ngram", drafting=FIXED) as draft,
        opened_llama(models / "more tokens.gguf") as other,
    ):
        with pytest.raises(UsageError, match="another draft"):
            draft.check(other)
        other.draft_model = draft
        with pytest.raises(UsageError, match="400 tokens"):
            draft.check(other)


def test_a_draft_that_fails_or_is_interrupted_harms_no_later_text(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure ends the drafting of its text; of an interrupted one nothing is left."""
    target, notes = models / "target.gguf", list[str]()
    first, second = (np.arange(start, start + 11, dtype=np.intc) for start in (40, 80))
    with SpecgenDraft(
        target, models / "good.gguf", n_ctx=N_CTX, drafting=FIXED, note=notes.append
    ) as draft:
        (context,) = draft.contexts
        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                draft(first)
        after = [draft(first).tolist()]
        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", lambda _batch: 1 / 0)
            assert not len(draft(second))
        (note,) = notes
        assert "drafting failed, going on without a draft: ZeroDivisionError" in note
        for more in (1, 2):
            assert not len(draft(np.append(second, [5] * more).astype(np.intc)))
        after += [draft(text).tolist() for text in (first, second)]
    with SpecgenDraft(target, models / "good.gguf", n_ctx=N_CTX, drafting=FIXED) as fresh:
        assert [fresh(text).tolist() for text in (first, first, second)] == after
    assert [len(each) for each in after] == [4, 4, 4]
