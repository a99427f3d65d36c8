"""Everything that tests must cover is registered, and a separate package can provide a drafter."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from specgen import drafters
from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.kinds import ANY_FILE, KINDS, find_kind, kinds
from specgen.errors import UsageError
from specgen.events import DraftedEvent
from specgen.method import verifiers as verify
from specgen.method.drafter import Drafter
from specgen.method.policy import FixedPolicy, RoundResult
from specgen.options import DraftOptions, SamplerOptions, VerifierName
from tests.helpers.cli import ended
from tests.helpers.common import ROOT, UNFILTERED
from tests.helpers.fake_backend import FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import GREEDY, N_VOCAB, Setup
from tests.registry import ARCHITECTURES, CACHES, DRAFTERS, KINDS_TESTED, ON_FAKES, VERIFIERS, Text
from tests.tiny import Architecture, TinyConfig, write_tiny_model

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)


def classes_with(method: str, *modules: object) -> set[type[object]]:
    """The classes that modules define and that have a method of their own or of a base; not bases
    and protocols.
    """
    return {
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each)
        and each.__module__ == getattr(module, "__name__", "")
        and getattr(each, method, None) not in (None, getattr(Drafter, method, None))
        and not getattr(each, "_is_protocol", False)
        and not inspect.isabstract(each)
    }


def modules_of_drafters() -> Iterator[object]:
    for found in pkgutil.walk_packages(drafters.__path__, f"{drafters.__name__}."):
        yield importlib.import_module(found.name)


def test_every_drafter_is_registered() -> None:
    found = classes_with("propose", *modules_of_drafters())
    assert ModelDrafter in found
    assert Drafter not in found
    assert found <= {case.kind for case in DRAFTERS.values()}


def test_every_verifier_is_registered() -> None:
    assert set(VERIFIERS) == set(get_args(VerifierName))
    made = {type(case.make()) for case in VERIFIERS.values()}
    found = classes_with("verify", verify)
    assert {each for each in found if not inspect.isabstract(each)} == made
    for name, case in VERIFIERS.items():
        assert type(verify.VERIFIERS[name]) is type(case.make())


def test_every_architecture_is_registered() -> None:
    assert set(ARCHITECTURES) == set(get_args(Architecture))
    assert list(CACHES.values()) == ["llama", "gemma3", "mamba", "lfm2", "jamba"]


@pytest.mark.parametrize("sampler", [GREEDY, UNFILTERED], ids=["greedy", "random"])
@pytest.mark.parametrize("name", ON_FAKES)
def test_a_drafter_behaves_as_its_registration_says(name: str, sampler: SamplerOptions) -> None:
    case = DRAFTERS[name]
    made: list[object] = []
    drawn: list[bool] = []

    class Noting(FixedPolicy):
        def observe(self, result: RoundResult) -> None:
            drawn.append(result.draft.is_sampled)

    def make(state: object) -> object:
        made.append(ON_FAKES[name](Text(state, noisy(LANGUAGE, 0.7), LETTERS, sampler)))  # type: ignore[arg-type]
        return made[0]

    setup = Setup(
        sampler=sampler,
        drafter=make,  # type: ignore[arg-type]
        policy=Noting,
        drafting=DraftOptions(policy="fixed", max_tokens=6, p_min=0.0),
    )
    generation, events = setup.run()
    assert isinstance(made[0], case.kind)
    drafts = [event.nodes for event in events if isinstance(event, DraftedEvent) and event.nodes]
    assert bool(drafts) == (name != "nothing")
    assert generation.cascade is not None
    has_branches = any(len({node.parent for node in nodes}) < len(nodes) for nodes in drafts)
    # The most likely walks are all the same one.
    assert has_branches == (case.trees and (sampler is UNFILTERED or not case.draws))
    assert any(drawn) == (case.draws and sampler is UNFILTERED)


# --- drafters of others

EXAMPLE = ROOT / "docs" / "examples" / "phrases-drafter"


def specgen(packages: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), str(ROOT)])
    return ended(*arguments, env={"PYTHONPATH": path})


def test_a_separate_package_can_provide_a_drafter(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *install, "--target", packages, EXAMPLE], check=True)
    target = write_tiny_model(tmp_path / "target.gguf", TinyConfig(logit_scale=6.0))
    run = ("run", "-m", target, "-n", "40", "-t", "1", "--json", "the cat")
    plain = specgen(tmp_path, *run, "--draft", "none")
    assert plain.returncode == 0, plain.stderr
    answer = json.loads(plain.stdout.splitlines()[-1])["text"]
    phrases = tmp_path / "phrases.txt"
    phrases.write_text("\n".join(answer[at : at + 12] for at in range(0, len(answer), 4)), "utf-8")
    drafted = specgen(packages, *run, "--draft", f"phrases:{phrases}", "--policy", "fixed")
    assert drafted.returncode == 0, drafted.stderr
    finished = json.loads(drafted.stdout.splitlines()[-1])
    assert finished["text"] == answer
    assert finished["n_accepted"] > 0
    missing = specgen(packages, *run, "--draft", "phrases:missing.txt")
    assert missing.returncode == UsageError.exit_code
    assert missing.stderr.startswith("error: missing.txt cannot be read")
    unknown = specgen(tmp_path, *run, "--draft", f"phrases:{phrases}")
    assert unknown.returncode != 0


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    about = tmp_path / "broken_draft-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-draft\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[specgen.drafts]\nbroken = broken_draft:KIND\n")
    (tmp_path / "broken_draft.py").write_text("import no_such_module\n")
    target = write_tiny_model(tmp_path / "target.gguf", TinyConfig())
    draft = write_tiny_model(tmp_path / "draft.gguf", TinyConfig())
    result = specgen(tmp_path, "run", "-m", target, "-md", draft, "-n", "4", "the cat")
    assert result.returncode == UsageError.exit_code
    assert "Traceback" not in result.stderr
    assert "'broken' cannot be imported" in result.stderr
    assert "no_such_module" in result.stderr
    assert "uninstall the package broken-draft" in result.stderr


def test_every_kind_of_draft_has_registered_cases() -> None:
    names = [kind.name for kind in kinds()]
    assert len(names) == len(set(names)) == len(KINDS) + 1
    assert set(KINDS_TESTED) == set(names)
    assert {case for cases in KINDS_TESTED.values() for case in cases} <= set(DRAFTERS)
    assert find_kind("no such word") is None
    for listed, kind in zip(KINDS, kinds(), strict=False):
        assert kind.name == (listed.word or listed.architecture)
    found = find_kind(Path("missing.gguf"))
    assert found is not None
    assert found.name == ANY_FILE
