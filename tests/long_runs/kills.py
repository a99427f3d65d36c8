"""Commands that write files, killed at random moments, and two at once: the next run is right.

    python -m tests.long_runs.kills --rounds 100 --seed 1

Each round runs a command on a home that the rounds before it left, ends it with SIGKILL after a random time, or
lets another one run beside it, and then runs it whole: its answers must be what they are on a fresh home.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.long_runs.fuzz_cases import variables
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

_EXACT = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-n", "24", "-q")
_PROMPTS = ("the cat", "the dog and the cat", "a", "else", "one two three one two", "def f(x):")
_BENCH = ("-n", "8", "--count", "1", "-t", "1")
_PREFIXES = ("--draft", "none", "--prefix-store", "all", "-c", "2048")
_PATIENCE_S = 120.0


class Kills:
    """A home, models, and commands that use them."""

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        """`names` of commands; by default all."""
        self.home = folder / "home"
        config = TinyConfig(
            logit_scale=6.0,
            chat_template=CHATML_TEMPLATE,
            unprintable_scale=0.0,
            n_ctx_train=2048,
        )
        target = write_tiny_model(folder / "target.gguf", config)
        draft = replace(config.draft(0.05), tensor_type="f16", n_embd=256, n_head=4)
        draft_file = write_tiny_model(folder / "draft.gguf", draft)
        self._lines = folder / "in.jsonl"
        self._lines.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in _PROMPTS))
        self._results = folder / "out.jsonl"
        models = ["-m", str(target), "-md"]
        drafted, by_ngrams = [*models, str(draft_file)], [*models, "ngram"]
        find = ["draft", "find", *models[:2], str(draft_file), "--save", "-q"]
        commands: Mapping[str, list[str]] = {
            "run": ["run", *drafted, *_EXACT, "the cat"],
            "prefix store": [
                "run",
                *models[:2],
                *_PREFIXES,
                *_EXACT,
                "the cat is in the else " * 60,
            ],
            "lookup store": ["run", *by_ngrams, "--lookup-store", *_EXACT, "a cat"],
            "batch": ["batch", str(self._lines), str(self._results), *drafted, *_EXACT],
            "tune": ["tune", *drafted, "-t", "1", "-q"],
            "draft find": find,
            "bench": ["bench", *by_ngrams, *_BENCH, "--json", "report.json"],
        }
        self.commands = {name: commands[name] for name in names or commands}
        self.expected = {name: self.text_of(name, self.run(name)) for name in self.commands}
        shutil.rmtree(self.home)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        self.home.mkdir(exist_ok=True)
        environment = {**os.environ, **variables(self.home), "OMP_WAIT_POLICY": "passive"}
        del environment["HOME"]  # packages of the user may be there
        return subprocess.Popen(
            [sys.executable, "-m", "specgen", *self.commands[name]],
            env=environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, name: str) -> tuple[int, bytes, bytes]:
        """Run a command to its end."""
        with self.start(name) as process:
            out, err = process.communicate(timeout=_PATIENCE_S)
            return process.returncode, out, err

    def text_of(self, name: str, done: tuple[int, bytes, bytes]) -> object:
        """What has to be the same each time. Raises `AssertionError` if the command failed."""
        code, out, err = done
        assert code == 0, f"{name}: exit code {code}: {err.decode()[-500:]}"
        assert b"Traceback" not in err, err.decode()[-500:]
        if name != "batch":
            return (
                out if name in ("run", "prefix store", "lookup store") else None
            )  # the others tell times
        records = [json.loads(line) for line in self._results.read_text().splitlines()]
        found = sorted(
            (record["custom_id"], record["response"]["body"]["choices"][0]["message"]["content"])
            for record in records
        )
        self._results.unlink()
        return found


def main() -> int:
    """Kill commands, and see that nothing is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", default=[], help="by default all")
    asked = parser.parse_args()
    chance, counts = random.Random(asked.seed), collections.Counter[str]()
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        kills = Kills(Path(folder), asked.command)
        for number in range(asked.rounds):
            name = chance.choice([*kills.commands])
            if chance.random() < 0.2:
                shutil.rmtree(kills.home, ignore_errors=True)
            first = kills.start(name)
            if name != "batch" and chance.random() < 0.25:
                kind = "beside another"
            else:
                kind = "killed"
                time.sleep(chance.random() * 2.5)
                kind = "ended before" if first.poll() is not None else kind
                first.kill()
                first.communicate()
            try:
                text = kills.text_of(name, kills.run(name))
                if text != kills.expected[name]:
                    findings.append(f"round {number}: {name} {kind}: {text!r}")
                if kind == "beside another":
                    out, err = first.communicate(timeout=_PATIENCE_S)
                    kills.text_of(name, (first.returncode, out, err))
            except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                findings.append(f"round {number}: {name} {kind}: {error}")
            counts[f"{name}, {kind}"] += 1
            if findings:
                print(findings[-1], file=sys.stderr, flush=True)
                break
    print(json.dumps({"counts": dict(sorted(counts.items())), "findings": findings}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
