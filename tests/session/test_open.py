"""The choice among several possible drafts of a target, and the messages about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest

from specgen.errors import BackendError, MemoryLimitError
from specgen.llama import LlamaBackend
from specgen.models.files import identify
from specgen.options import DraftSource, SessionOptions
from specgen.session import calibration
from specgen.session.calibration import PairCosts
from specgen.session.choose_models import DraftChoice
from specgen.session.engine import Engine
from specgen.session.open import WantedSession, open_session, use_first
from specgen.session.saved_drafts import SavedDraft, save_draft, saved_drafts_file
from specgen.session.session import Session
from specgen.system import machine
from specgen.system.folders import measurements_file
from tests.helpers.cli import Specgen
from tests.helpers.sessions import opened

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: Batches that are nearly free, ones that no draft can pay for, and a draft as slow as a target.
CHEAP = PairCosts({1: 0.030, 2: 0.031, 3: 0.032, 4: 0.033}, 0.001)
DEAR = PairCosts({1: 0.030, 2: 0.060, 3: 0.090, 4: 0.120}, 0.001)
SLOW_DRAFT = PairCosts(CHEAP.batch_s, 0.030)


class Measured:
    """Replaces the timing of a model's decodes: returns given times, and counts the calls. The
    target's batches are those of the first costs.
    """

    def __init__(self) -> None:
        self.costs: dict[str, PairCosts | Exception] = {}
        self.asked: list[str] = []

    def __call__(
        self,
        backend: LlamaBackend,
        sizes: Iterable[int],
        budget_s: Callable[[], float],
        interrupted: Callable[[], bool],
    ) -> dict[int, float]:
        name = backend.model.name
        if name == "target.gguf":
            found = [costs for costs in self.costs.values() if isinstance(costs, PairCosts)]
            return dict((found[0] if found else CHEAP).batch_s)
        self.asked.append(name)
        costs = self.costs.get(name, CHEAP)
        if isinstance(costs, Exception):
            raise costs
        return {size: size * costs.draft_token_s for size in sizes}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    measured = Measured()
    monkeypatch.setattr(calibration, "measure_sizes", measured)
    monkeypatch.setattr(machine, "share_of_others", lambda *_: 0.0)
    return measured


@pytest.fixture
def session(tiny_models: Path) -> Iterator[Session]:
    with opened(tiny_models / "target.gguf") as session:
        yield session


@pytest.fixture
def choices(tiny_models: Path) -> tuple[DraftChoice, ...]:
    return (
        DraftChoice(tiny_models / "draft.gguf", "drafting with the partner"),
        DraftChoice(tiny_models / "bad.gguf", "drafting with the general one", "find a better"),
        DraftChoice("ngram", "drafting with n-grams", "search"),
    )


def test_a_model_that_is_too_slow_gives_way_to_the_next(
    session: Session,
    choices: tuple[DraftChoice, ...],
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured.costs = {"draft.gguf": SLOW_DRAFT}
    note = use_first(session, choices)
    assert session.draft_name == "bad.gguf"
    assert note == (
        "not drafting with draft.gguf: "
        "answers would be only about 0.8 times as fast as without drafts; "
        "drafting with the general one; find a better"
    )
    assert measured.asked == ["draft.gguf", "bad.gguf"]
    # A model that is known to be too slow is not loaded again.
    tried: list[object] = []
    change_draft = Session.change_draft

    def noted(self: Session, source: DraftSource) -> None:
        tried.append(source)
        change_draft(self, source)

    monkeypatch.setattr(Session, "change_draft", noted)
    assert use_first(session, choices) == note
    assert tried == [choices[1].draft]
    assert measured.asked == ["draft.gguf", "bad.gguf"]


def test_where_batches_are_too_expensive_no_other_model_is_tried(
    session: Session, choices: tuple[DraftChoice, ...], measured: Measured
) -> None:
    measured.costs = {"draft.gguf": DEAR}
    assert use_first(session, choices) == (
        "not drafting with draft.gguf: "
        "batches of the target take too long here for any draft model; "
        "drafting with n-grams; search"
    )
    assert session.draft_name == "ngram"
    assert measured.asked == ["draft.gguf"]


@pytest.mark.parametrize("error", [MemoryLimitError("no room"), BackendError("broken")])
def test_a_draft_whose_context_cannot_be_had_gives_way_to_the_next(
    session: Session,
    choices: tuple[DraftChoice, ...],
    measured: Measured,
    error: Exception,
) -> None:
    measured.costs = {"draft.gguf": error}
    assert use_first(session, choices) == f"{error}; drafting with the general one; find a better"
    assert session.draft_name == "bad.gguf"
    assert use_first(session, choices[:1]) == f"{error}; not drafting"
    assert session.draft_name == "none"


# --- the command


@pytest.fixture
def target(tiny_models: Path) -> Path:
    """A target whose partner is on the disk, by the user's own list of models."""
    from specgen.models.files import file_sha256
    from specgen.models.registry import load_registry
    from tests.helpers.fetch import store

    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    config = saved_drafts_file().parent
    config.mkdir(parents=True)
    about = 'licence = "MIT"\nparameters = "1"\nquantisation = "F32"\ndescription = "tiny"\n'
    tables = "".join(
        f'[[models]]\nname = "{path.stem}"\nfile = "{path.name}"\n'
        f"size_bytes = {path.stat().st_size}\n"
        f'sha256 = "{file_sha256(path)}"\n{about}'
        for path in (target, draft)
    )
    pair = '[[pairs]]\nname = "tiny"\ntarget = "target"\ndraft = "draft"\ndescription = "tiny"\n'
    (config / "models.toml").write_text(tables + pair, encoding="utf-8")
    store(load_registry().model("draft"), draft.read_bytes())
    return target


def test_run_uses_a_partner_only_if_it_pays(
    target: Path, measured: Measured, specgen: Specgen
) -> None:
    def drafted_by(*more: str) -> tuple[str, list[str]]:
        own = ("-m", str(target), "-t", "1", "-fa", "off", "-n", "8")
        result = specgen("run", "--json", PROMPT, *more, *own)
        assert result.code == 0, result.err
        return json.loads(result.out.splitlines()[0])["draft"], result.err.splitlines()

    draft, (note,) = drafted_by()
    assert draft == "draft.gguf"
    assert "in the pair tiny" in note
    measured.costs = {"draft.gguf": DEAR}
    assert drafted_by()[0] == "draft.gguf"  # as it was kept
    assert measured.asked == ["draft.gguf"]
    measurements_file().write_text("{", encoding="utf-8")
    for _ in range(2):
        draft, (note,) = drafted_by()
        assert draft == "ngram"
        assert note.startswith("note: not drafting with draft.gguf: batches")
        assert note.endswith(
            "; drafting with n-grams; `specgen draft find` tries what is on this disk"
        )
    # What the user names, or had measured, is his own.
    assert drafted_by("--draft", "draft") == ("draft.gguf", [])
    identity = identify(target)
    assert identity is not None
    save_draft(identity, SavedDraft(target.parent / "draft.gguf", speedup=1.5))
    draft, (note,) = drafted_by()
    assert (draft, "not drafting" in note) == ("draft.gguf", False)
    assert measured.asked == 2 * ["draft.gguf"]
    assert drafted_by("--quiet") == ("draft.gguf", [])


def test_the_whole_time_of_opening_is_counted(tiny_models: Path) -> None:
    """The clock advances by a second each time it is read."""
    ticks = count()

    def clock() -> float:
        return float(next(ticks))

    options = SessionOptions(tiny_models / "target.gguf", "none")
    drafts = (DraftChoice(tiny_models / "draft.gguf", "it is there"),)
    with open_session(WantedSession(options, drafts), clock=clock) as session:
        assert sum(session.setup_s.values()) == clock() - 1.0
        assert session.setup_s["measuring_s"] > 0.0
        counted_s = sum(session.setup_s.values())
        before_s = clock()
        with Engine(session, n_ctx=64):
            engine_s = clock() - 1.0 - (before_s + 1.0)
            assert sum(session.setup_s.values()) == counted_s + engine_s
