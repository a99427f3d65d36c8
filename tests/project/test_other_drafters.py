"""Another package brings a drafter, and nothing in specgen is changed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from specgen.drafters.kinds import ANY_FILE, KINDS, find_kind, kinds
from tests.helpers.cli import ended
from tests.helpers.common import ROOT
from tests.registry import DRAFTERS, KINDS_TESTED
from tests.tiny import TinyConfig, write_tiny_model

EXAMPLE = ROOT / "docs" / "examples" / "phrases-drafter"


def specgen(packages: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), str(ROOT)])
    return ended(*arguments, env={"PYTHONPATH": path})


def test_a_package_of_its_own_drafts(tmp_path: Path) -> None:
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
    unknown = specgen(tmp_path, *run, "--draft", f"phrases:{phrases}")
    assert unknown.returncode != 0


def test_the_registry_has_every_kind() -> None:
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
