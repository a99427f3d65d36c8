"""llama.cpp's own programs and llama-cpp-python's lookup as peers: told, read, and stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prompt_lookup import CountingDrafter, LookupJob, run_lookup
from specgen.measure.bench import peers
from specgen.measure.bench.peers import (
    LOOKUP,
    PLAIN,
    SETTINGS,
    SIMPLE,
    PeerError,
    PeerJob,
    PeerPrompt,
    PeerSetting,
    arguments_of,
    find_program,
    parse_output,
    peer_prompt,
    run_peer,
    run_program,
    sampler_flags,
)
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.engine import generate
from specgen.session.loaded_models import Models
from tests.helpers.common import posix
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

TEXT = "<|im_start|>user\nCount from one to five.<|im_end|>\n<|im_start|>assistant\n"
PROMPT = PeerPrompt(TEXT, 15, ends=("<|endoftext|>", "<|im_end|>"))
ANSWER = "The number of people who have died by drowning is 15."

#: What the programs of llama-cpp-python 0.3.36 said to SmolLM2-135M, -n 16, some lines left out.
SIMPLE_STDERR = """\
Read 73 bytes from binary file /tmp/p.txt
0.00.361.617 I cmn          init: llama threadpool init, n_threads = 1
0.00.467.301 I common_speculative_init_result: loading draft model 'models/SmolLM2.gguf'
0.01.195.621 I encoded   15 tokens in    0.167 seconds, speed:   89.874 t/s
0.01.195.622 I decoded   16 tokens in    0.428 seconds, speed:   37.357 t/s
0.01.195.623 I\x20
0.01.195.623 I n_draft   = 3
0.01.195.625 I n_predict = 16
0.01.195.625 I n_drafted = 12
0.01.195.625 I n_accept  = 12
0.01.195.626 I accept    = 100.000%
0.01.195.686 I common_perf_print:    sampling time =       1.68 ms
0.01.195.689 I common_perf_print: prompt eval time =     433.70 ms /    32 tokens
"""
LOOKUP_STDERR = """\
0.00.508.563 I encoded   15 tokens in    0.098 seconds, speed:  307.566 t/s
0.00.508.565 I decoded   15 tokens in    0.184 seconds, speed:   81.470 t/s
0.00.508.565 I n_draft      = 5
0.00.508.565 I n_predict    = 15
0.00.508.565 I n_drafted    = 0
0.00.508.567 I t_draft      = 0.14 ms, inf us per token, 0.00 tokens per second
0.00.508.567 I n_accept     = 0
0.00.508.567 I accept       = -nan%
"""
REFUSED_STDERR = """\
0.02.406.281 I common_speculative_init_result: loading draft model 'models/SmolLM2.gguf'
0.02.693.003 E spec common_specu: the target and draft vocabs are not compatible
terminate called after throwing an instance of 'std::runtime_error'
  what():  draft model vocab type must match target model to use speculation
"""
MISSING_STDERR = """\
0.00.005.088 E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file)
0.00.005.292 E cmn  common_init_: failed to load model '/nope.gguf'
"""
USAGE_STDERR = """\
error while handling argument "--spec-type": unknown speculative type: draft-simpl

usage:
--spec-type none,draft-simple                  comma-separated list of types
to show complete usage, run with -h
"""


def job(**changes: object) -> PeerJob:
    plain = PeerJob(Path("target.gguf"), PROMPT, 16, 2, draft=Path("draft.gguf"))
    return replace(plain, **changes)  # type: ignore[arg-type]


def command_line(setting: PeerSetting, job: PeerJob) -> str:
    return " ".join(arguments_of(setting, job, Path("prompt")))


def script(folder: Path, body: str, name: str = SIMPLE) -> Path:
    """A program in Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return path


def failing(folder: Path, stderr: str, end: str = "sys.exit(1)") -> Path:
    return script(folder, f"sys.stderr.write({stderr!r})\nsys.stderr.flush()\n{end}\n")


class TestFigures:
    def test_speculative_simple_is_taken_as_printed(self) -> None:
        stdout = f"\n\n{TEXT}{ANSWER}\n\n\n\n"
        result = parse_output(stdout, SIMPLE_STDERR, SIMPLE, PROMPT, ("program",))
        assert result.text == ANSWER
        assert result.tokens_per_s == 37.357
        assert (result.n_tokens, result.seconds) == (16, 0.428)
        assert (result.n_prompt_tokens, result.prompt_s) == (15, 0.167)
        assert (result.n_drafted, result.n_accepted) == (12, 12)
        assert result.command == ("program",)

    def test_the_first_token_of_lookup_costs_it_nothing(self) -> None:
        stdout = f"\n\n{TEXT}{ANSWER}<|im_end|>\n\n\n\n"
        result = parse_output(stdout, LOOKUP_STDERR, LOOKUP, PROMPT, ())
        assert result.text == ANSWER
        assert result.tokens_per_s == pytest.approx(81.470 * 14 / 15)
        assert (result.n_tokens, result.n_drafted, result.n_accepted) == (15, 0, 0)

    def test_one_token_is_no_speed_of_lookup(self) -> None:
        stderr = LOOKUP_STDERR.replace("decoded   15", "decoded    1")
        assert parse_output("", stderr, LOOKUP, PROMPT, ()).tokens_per_s is None

    def test_figures_without_a_prefix(self) -> None:
        stderr = "\n".join(line[15:] for line in SIMPLE_STDERR.splitlines())
        assert parse_output("", stderr, SIMPLE, PROMPT, ()).tokens_per_s == 37.357

    @pytest.mark.parametrize("missing", ["decoded", "encoded", "n_drafted", "n_accept"])
    def test_no_figures(self, missing: str) -> None:
        lines = [line for line in SIMPLE_STDERR.splitlines() if missing not in line]
        with pytest.raises(PeerError, match="tells no figures"):
            parse_output("", "\n".join(lines), SIMPLE, PROMPT, ())


class TestText:
    @staticmethod
    def text(stdout: str, prompt: PeerPrompt) -> str | None:
        return parse_output(stdout, SIMPLE_STDERR, SIMPLE, prompt, ()).text

    def test_an_answer_may_begin_and_end_with_newlines(self) -> None:
        assert self.text(f"\n\n{TEXT}\n\nYes\n\n\n\n\n\n", PROMPT) == "\n\nYes\n\n"

    def test_the_token_before_the_prompt_is_no_part_of_it(self) -> None:
        for text in ("Hi there", "<s>Hi there"):
            prompt = PeerPrompt(text, 3, bos="<s>")
            assert self.text("\n\n<s>Hi there you\n\n\n\n", prompt) == " you"

    def test_other_spaces_in_the_prompt(self) -> None:
        prompt = PeerPrompt("<s>[INST] Hi [/INST] ", 3, bos="<s>")
        assert self.text("\n\n<s> [INST] Hi  [/INST] Yes\n\n\n\n", prompt) == "Yes"

    def test_text_that_is_not_the_prompt(self) -> None:
        assert self.text("\n\nsomething else\n\n\n\n", PROMPT) is None


class TestCommand:
    def test_what_all_programs_are_told(self) -> None:
        line = command_line(PLAIN, job())
        assert line == (
            "-m target.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 1024 "
            "--spec-ngram-simple-size-m 1 -bf prompt --no-escape -n 15 -c 256 -b 2048 -fit off "
            "-t 2 -tb 2 -fa auto -ngl all -ctk f16 -ctv f16 --temp 0"
        )

    def test_a_draft_model(self) -> None:
        line = command_line(SETTINGS[1], job(draft_context=ContextOptions(n_gpu_layers=0)))
        assert "--spec-type draft-simple --spec-draft-n-max 8 --spec-draft-p-min 0.75" in line
        assert " -md draft.gguf -ngld 0 -ctkd f16 -ctvd f16 " in line
        with pytest.raises(PeerError, match="no draft model"):
            command_line(SETTINGS[1], job(draft=None))

    def test_contexts_and_threads(self) -> None:
        context = ContextOptions(n_ctx=3000, n_threads_batch=4, flash_attention="off")
        line = command_line(PLAIN, job(target_context=context, ignore_eos=True))
        assert "-c 3072 -b 3072 -fit off -t 2 -tb 4 -fa off" in line
        assert line.endswith("--ignore-eos")

    def test_samplers(self) -> None:
        options = SamplerOptions(temperature=0.8, seed=7)
        assert " ".join(sampler_flags(options)) == (
            "--temp 0.8 --top-k 40 --top-p 0.95 --min-p 0.05 --seed 7"
        )
        assert list(sampler_flags(SamplerOptions(seed=7))) == ["--temp", "0"]
        with pytest.raises(PeerError, match="repeat_penalty cannot be passed on"):
            list(sampler_flags(SamplerOptions(repeat_penalty=1.1)))

    def test_too_few_tokens(self) -> None:
        with pytest.raises(PeerError, match="1 tokens are too few"):
            command_line(PLAIN, job(n_tokens=1))

    def test_names_are_different(self) -> None:
        names = [setting.name for setting in (PLAIN, *SETTINGS)]
        assert len(set(names)) == len(names)


class TestFinding:
    def test_places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(peers.PEERS_VARIABLE, raising=False)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
        name = f"{SIMPLE}.exe" if os.name == "nt" else SIMPLE
        with pytest.raises(PeerError) as caught:
            find_program(SIMPLE)
        assert caught.value.hint == "make peers, or set SPECGEN_PEERS"
        for place in ("venv/peers/bin", "variable", "given/bin"):
            (tmp_path / place).mkdir(parents=True)
            (tmp_path / place / name).touch()
        assert find_program(SIMPLE) == tmp_path / "venv" / "peers" / "bin" / name
        monkeypatch.setenv(peers.PEERS_VARIABLE, str(tmp_path / "variable"))
        assert find_program(SIMPLE) == tmp_path / "variable" / name
        assert find_program(SIMPLE, tmp_path / "given") == tmp_path / "given" / "bin" / name
        with pytest.raises(PeerError, match=f"there is no {LOOKUP} in"):
            find_program(LOOKUP, tmp_path / "given")


@posix
class TestRunning:
    #: Says its prompt, as read from the file, and an answer.
    ECHO = (
        "prompt = open(sys.argv[sys.argv.index('-bf') + 1], newline='').read()\n"
        "print('\\n\\n' + {bos!r} + prompt + 'Yes.', end='\\n\\n\\n\\n')\n"
        f"sys.stderr.write({SIMPLE_STDERR!r})\n"
    )

    def test_an_answer(self, tmp_path: Path) -> None:
        program = script(tmp_path, self.ECHO.format(bos=""))
        result = run_peer(program, PLAIN, job())
        assert result is not None
        assert result.text == "Yes."
        assert result.command[0] == str(program)

    def test_the_token_that_llama_cpp_adds_is_not_told(self, tmp_path: Path) -> None:
        program = script(tmp_path, self.ECHO.format(bos="<s>") + "assert prompt == 'Hi\\n'\n")
        result = run_peer(program, PLAIN, job(prompt=PeerPrompt("<s>Hi\n", 15, bos="<s>")))
        assert result is not None
        assert result.text == "Yes."

    def test_figures_that_were_lost(self, tmp_path: Path) -> None:
        first = f"if not os.path.exists({str(tmp_path / 'once')!r}):\n"
        first += f"    sys.exit(open({str(tmp_path / 'once')!r}, 'w').close())\n"
        result = run_peer(script(tmp_path, first + self.ECHO.format(bos="")), PLAIN, job())
        assert result is not None
        assert result.text == "Yes."
        with pytest.raises(PeerError, match="tells no figures: it does not say why"):
            run_peer(script(tmp_path, ""), PLAIN, job())

    def test_another_number_of_tokens(self, tmp_path: Path) -> None:
        program = script(tmp_path, self.ECHO.format(bos=""))
        with pytest.raises(PeerError, match="reads the prompt as 15 tokens, specgen as 14"):
            run_peer(program, PLAIN, job(prompt=replace(PROMPT, n_tokens=14)))

    @pytest.mark.parametrize(
        ("stderr", "words"),
        [
            (REFUSED_STDERR, "draft model vocab type must match target model to use speculation"),
            (MISSING_STDERR, "cmn  common_init_: failed to load model '/nope.gguf'"),
            (USAGE_STDERR, 'error while handling argument "--spec-type": unknown speculative'),
            ("some\nwords\nwarning: no usable GPU found\n", "words"),
            ("", "it does not say why"),
        ],
    )
    def test_failures_in_its_own_words(self, tmp_path: Path, stderr: str, words: str) -> None:
        with pytest.raises(PeerError) as caught:
            run_peer(failing(tmp_path, stderr), PLAIN, job())
        assert caught.value.message.startswith(f"{SIMPLE} failed (1): {words}")

    def test_a_crash(self, tmp_path: Path) -> None:
        end = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
        with pytest.raises(PeerError, match="was killed by SIGKILL: some words"):
            run_peer(failing(tmp_path, "some words\n", end), PLAIN, job())

    def test_what_cannot_be_run(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match="cannot be run: No such file"):
            run_peer(tmp_path / "nothing", PLAIN, job())

    def test_options_in_the_environment_do_not_hold(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LLAMA_ARG_THREADS", "1")
        program = script(tmp_path, "print([key for key in os.environ if 'LLAMA_ARG' in key])")
        assert run_program([str(program)], limit_s=60) == ("[]\n", "")

    def test_a_limit(self, tmp_path: Path) -> None:
        program = script(tmp_path, "time.sleep(600)")
        with pytest.raises(PeerError, match="did not end within 0.5 s and was killed"):
            run_peer(program, PLAIN, job(), limit_s=0.5)

    @pytest.mark.parametrize("second", [False, True])
    def test_an_interruption_kills_it(self, tmp_path: Path, second: bool) -> None:
        pid_file = tmp_path / "pid"
        body = "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
        program = script(tmp_path, body)

        def interrupted() -> bool:
            is_running = pid_file.exists() and pid_file.read_text() != ""
            if is_running and second:
                raise KeyboardInterrupt
            return is_running

        command = [str(program), str(pid_file)]
        if second:
            with pytest.raises(KeyboardInterrupt):
                run_program(command, limit_s=60, interrupted=interrupted)
        else:
            assert run_program(command, limit_s=60, interrupted=interrupted) is None
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


class TestLookup:
    def test_counting(self) -> None:
        drafter = CountingDrafter(lambda ids: np.arange(3))
        drafter(np.zeros(5))
        drafter(np.zeros(8))  # two of three accepted, and one token of its own
        drafter(np.zeros(9))  # none
        drafter.settle(13)
        assert (drafter.n_drafted, drafter.n_accepted) == (9, 5)

    def test_nothing_drafted(self) -> None:
        drafter = CountingDrafter(lambda ids: np.zeros(0))
        drafter(np.zeros(5))
        drafter.settle(6)
        assert (drafter.n_drafted, drafter.n_accepted) == (0, 0)

    def test_it_says_what_the_target_says(self, tmp_path: Path) -> None:
        # Without flash attention rounding does not depend on the batch.
        context = ContextOptions(n_threads=1, flash_attention="off")
        path = write_tiny_model(tmp_path / "tiny.gguf", TinyConfig(logit_scale=6.0))
        options = SessionOptions(
            target=path,
            draft="none",
            drafting=DraftOptions(),
            generation=GenerationOptions(max_tokens=24),
            target_context=context,
        )
        with Models(options, time.perf_counter) as loaded:
            prompt = loaded.prompts.of_text("the sum is the sum is the sum", chat=False)
            *_, finished = generate(loaded, prompt)
        task = LookupJob(str(path), prompt.tokens, 24, 1, flash_attention=False)
        result = run_lookup(task)
        assert result is not None
        assert result.text == finished.text  # type: ignore[union-attr]
        assert result.token_ids is not None
        assert len(result.token_ids) == result.n_tokens <= 24
        assert result.tokens_per_s is not None
        assert 0 <= result.n_accepted <= result.n_drafted

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match=r"failed \(1\): .*nope"):
            run_lookup(LookupJob(str(tmp_path / "nope.gguf"), (1, 2), 8, 1))


def have_programs() -> bool:
    try:
        return all(find_program(name).is_file() for name in (SIMPLE, LOOKUP))
    except PeerError:
        return False


@pytest.mark.skipif(not have_programs(), reason="make peers, or SPECGEN_PEERS")
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("tokenizer", ["bpe", "spm"])
@pytest.mark.parametrize("chat", [True, False])
def test_the_real_programs_read_prompts_as_specgen_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tokenizer: str,
    add_bos: bool,
    chat: bool,
) -> None:
    monkeypatch.setattr(peers, "N_TRIES", 30)
    config = TinyConfig(
        logit_scale=6.0,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        add_bos=add_bos,
        chat_template="{{ bos_token }}" + CHATML_TEMPLATE if chat else None,
    )
    path = write_tiny_model(tmp_path / "tiny.gguf", config)
    context = ContextOptions(n_threads=1, flash_attention="off")
    options = SessionOptions(
        target=path,
        draft="none",
        generation=GenerationOptions(max_tokens=24),
        target_context=context,
    )
    with Models(options, time.perf_counter) as loaded:
        prompt = loaded.prompts.of_text("say 'a\\nb' and  the sum is the sum\n", chat=chat)
        *_, finished = generate(loaded, prompt)
        task = PeerJob(path, peer_prompt(loaded, prompt), 24, 1, path, target_context=context)
    for setting in (PLAIN, *(each for each in SETTINGS if not each.needs_mtp)):
        result = run_peer(find_program(setting.program), setting, task)
        assert result is not None, setting.name
        assert result.text is not None, setting.name
        assert result.text.startswith(finished.text), setting.name  # type: ignore[union-attr]
