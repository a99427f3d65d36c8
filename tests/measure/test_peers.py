"""llama.cpp's own programs and llama-cpp-python's lookup as peers of `benchmarks/`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import (
    LOOKUP,
    PEERS_VARIABLE,
    SIMPLE,
    PeerError,
    answer_of,
    peers_of,
    read_figures,
)
from benchmarks.prompt_lookup import CountingDrafter, LookupJob, run_lookup
from specgen.options import ContextOptions, GenerationOptions, SessionOptions
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.helpers.common import posix
from tests.tiny import TinyConfig, write_tiny_model

#: What the programs of llama-cpp-python 0.3.36 said to SmolLM2-135M, -n 16, some lines left out.
SIMPLE_STDERR = """\
0.01.195.621 I encoded   15 tokens in    0.167 seconds, speed:   89.874 t/s
0.01.195.622 I decoded   16 tokens in    0.428 seconds, speed:   37.357 t/s
0.01.195.623 I n_draft   = 3
0.01.195.625 I n_drafted = 12
0.01.195.625 I n_accept  = 12
0.01.195.626 I accept    = 100.000%
"""
LOOKUP_STDERR = """\
0.00.508.563 I encoded   15 tokens in    0.098 seconds, speed:  307.566 t/s
0.00.508.565 I decoded   15 tokens in    0.184 seconds, speed:   81.470 t/s
0.00.508.565 I n_drafted    = 0
0.00.508.567 I t_draft      = 0.14 ms, inf us per token, 0.00 tokens per second
0.00.508.567 I n_accept     = 0
0.00.508.567 I accept       = -nan%
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    path = write_tiny_model(tmp_path / "tiny.gguf", TinyConfig(logit_scale=6.0))
    options = SessionOptions(
        target=path,
        draft="none",
        generation=GenerationOptions(max_tokens=24),
        # Without flash attention rounding does not depend on the batch.
        target_context=ContextOptions(n_threads=1, flash_attention="off"),
    )
    with Session(options, time.perf_counter) as models:
        yield models


def test_the_figures_of_both_programs() -> None:
    outcome, n_prompt = read_figures(SIMPLE_STDERR, SIMPLE, "text")
    assert (n_prompt, outcome.n_tokens, outcome.tokens_per_s) == (15, 16, 37.357)
    assert (outcome.n_drafted, outcome.n_accepted) == (12, 12)
    assert outcome.text == "text"
    # The first token of a lookup costs it nothing.
    outcome, _ = read_figures(LOOKUP_STDERR, LOOKUP, "")
    assert outcome.tokens_per_s == pytest.approx(81.470 * 14 / 15)
    for missing in ("decoded", "encoded", "n_drafted", "n_accept"):
        lines = [line for line in SIMPLE_STDERR.splitlines() if missing not in line]
        with pytest.raises(PeerError, match="tells no figures"):
            read_figures("\n".join(lines), SIMPLE, "")


def test_the_answer_is_behind_the_prompt_whose_spaces_may_differ() -> None:
    assert answer_of("\n\nHi\n\nYes\n\n\n\n\n\n", "Hi", []) == "\n\nYes\n\n"
    prompt = "<s>[INST] Hi [/INST] "
    assert answer_of("\n\n<s> [INST] Hi  [/INST] Yes</s> x\n\n\n\n", prompt, ["</s>"]) == "Yes"
    assert answer_of("\n\nsomething else\n\n\n\n", "Hi", []) == ""


@posix
def test_a_program_answers(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LLAMA_ARG_THREADS", "1")
    n_prompt = len(session.prompts.of_text("Hi there").tokens)
    program = (
        f"#!{sys.executable}\nimport os, sys\n"
        "assert not [key for key in os.environ if 'LLAMA_ARG' in key]\n"
        "prompt = open(sys.argv[sys.argv.index('-bf') + 1], newline='').read()\n"
        "assert sys.argv[sys.argv.index('-n') + 1] == '23', sys.argv\n"
        f"print('\\n\\n' + {'<|begin|>'!r} + prompt + 'Yes.', end='\\n\\n\\n\\n')\n"
        f"sys.stderr.write({SIMPLE_STDERR!r}.replace('15 tokens', '{n_prompt} tokens'))\n"
    )
    for name in (SIMPLE, LOOKUP):
        (tmp_path / name).write_text(program, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    peers = peers_of(session, {})
    assert [peer.name for peer in peers] == ["llama.cpp ngram-simple 4/8", "llama.cpp lookup 8"]
    assert peers[0].answer("Hi there").text == "Yes."
    with pytest.raises(PeerError, match="not to be compared"):
        peers[0].answer("another prompt")


# --- llama-cpp-python's lookup


def test_drafted_and_accepted_tokens_are_counted() -> None:
    drafter = CountingDrafter(lambda ids: np.arange(3))
    drafter(np.zeros(5))
    drafter(np.zeros(8))  # two of three accepted, and one token of its own
    drafter(np.zeros(9))  # none
    drafter.settle(13)
    assert (drafter.n_drafted, drafter.n_accepted) == (9, 5)


def test_lookup_says_what_the_target_says(session: Session) -> None:
    prompt = session.prompts.of_text("the sum is the sum is the sum", chat=False)
    *_, finished = generate(session, prompt)
    path = str(session.options.target)
    result = run_lookup(LookupJob(path, prompt.tokens, 24, 1, flash_attention=False))
    assert result.text == finished.text  # type: ignore[union-attr]
    assert result.token_ids is not None
    assert len(result.token_ids) == result.n_tokens <= 24
    with pytest.raises(PeerError, match=r"failed \(1\): .*nope"):
        run_lookup(LookupJob(path + ".nope", (1, 2), 8, 1))
