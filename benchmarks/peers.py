r"""specgen, llama.cpp's speculative decoding programs and other engines, in interleaved runs.

`make peers` builds llama.cpp's programs. Each other engine is installed in a virtual environment:

    python -m venv openvino && openvino/bin/pip install openvino-genai
    python -m venv ik && ik/bin/pip install ik-llama-cpp-python
    python -m benchmarks.peers -m 7b.gguf -md 1b.gguf -md 0.5b.gguf -N 1 --json out.json \
        --openvino openvino/bin/python --ik-llama ik/bin/python

Prints the lines of `specgen bench` for plain decoding, for specgen with each draft, and for the
other programs in their most common settings. What is not installed is skipped. OpenVINO supports
only some weight types (`benchmarks/requantise.py` converts a model to one of them).
ik-llama-cpp-python has no speculative decoding.

While a program waits for its turn, its weights may be evicted from memory and its cores may enter a
sleep state. So each contender generates some tokens before its turn. About the figures of
llama.cpp's programs (llama-cpp-python 0.3.36):

- `llama-speculative-simple` starts its clock after the prefill of the prompt without its last
  token, and counts all tokens of the answer. Its figure is comparable to specgen's as it is.
- `llama-lookup` starts its clock after the whole prefill, so its first token takes no time. The
  figure here counts only the n - 1 tokens after it.
- Both may write some tokens after the limit. On a GPU, they may start the clock before the prefill
  has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.answers import (
    bench_prompts,
    command_line,
    opened,
    parser_of,
    show_progress,
    write_json,
)
from benchmarks.worker_client import (
    WARM_UP_PROMPT,
    EngineWorker,
    WorkerCommand,
    WorkerError,
    running_worker,
)
from specgen.errors import SpecgenError
from specgen.llama import default_threads
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.llama.mtp_layers import why_no_mtp
from specgen.measure.benchmark import Contender, Outcome, Runs, contender_of, figures_of, take_turns
from specgen.measure.prompts import FIXED_NOW, BenchPrompt
from specgen.options import DraftSource
from specgen.render.tables import bench_lines
from specgen.session.session import Session
from specgen.system.files import as_json
from specgen.system.folders import cache_folder

#: An environment variable. If it is set, programs are looked for in this folder only.
PEERS_VARIABLE = "SPECGEN_PEERS"
SIMPLE = "llama-speculative-simple"
LOOKUP = "llama-lookup"

#: The context size is a multiple of this.
_CONTEXT_STEP = 256
#: The part of the context for the longest drafts.
_DRAFT_TOKENS = 64
#: How often a program is run until its output is complete. The last lines may be missing, because
#: the programs do not wait for the thread that writes their log.
_N_TRIES = 3
#: The context size of other engines: enough for the prompts of `specgen bench` and of Spec-Bench.
_ENGINE_N_CTX = 4096
_NUMBER = r"(-?\d[\d.]*|-?inf|-?nan)"
_SPEED = rf"{{}}\s+{_NUMBER} tokens in\s+{_NUMBER} seconds, speed:\s+{_NUMBER} t/s"
_COUNT = rf"\bn_{{}}\s*=\s*{_NUMBER}"


class PeerError(SpecgenError):
    """Another program is missing, failed, took too long, or rejects the pair of models."""


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """One of llama.cpp's programs, with the options that choose how it drafts."""

    name: str
    arguments: tuple[str, ...]
    program: str = SIMPLE
    needs_draft: bool = False
    needs_mtp: bool = False


def _simple(name: str, types: str, *arguments: str, needs: str = "") -> PeerSetting:
    command = ("--spec-type", types, *arguments)
    return PeerSetting(name, command, needs_draft=needs == "draft", needs_mtp=needs == "mtp")


_NGRAMS = ("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8")
_THREE = ("--spec-draft-n-max", "3")
_EIGHT = ("--spec-draft-n-max", "8")
SETTINGS = (
    _simple("draft 3", "draft-simple", *_THREE, needs="draft"),
    _simple(
        "draft 8, p-min 0.75", "draft-simple", *_EIGHT, "--spec-draft-p-min", "0.75", needs="draft"
    ),
    _simple(
        "ngram-simple 4/8, draft 3", "ngram-simple,draft-simple", *_THREE, *_NGRAMS, needs="draft"
    ),
    _simple("ngram-simple 4/8", "ngram-simple", *_NGRAMS),
    PeerSetting("lookup 8", _EIGHT, program=LOOKUP),
    _simple("mtp 1", "draft-mtp", "--spec-draft-n-max", "1", needs="mtp"),
    _simple("mtp 3", "draft-mtp", *_THREE, needs="mtp"),
)


def find_program(name: str) -> Path:
    """Return the path of a program, in $SPECGEN_PEERS or else in this environment's `peers` folder.

    Raises:
        PeerError: If the program is not there.
    """
    place = Path(os.environ.get(PEERS_VARIABLE) or Path(sys.prefix) / "peers").expanduser()
    file = f"{name}.exe" if os.name == "nt" else name
    for path in (place / file, place / "bin" / file):
        if path.is_file():
            return path
    raise PeerError(
        f"there is no {name} in {place}", hint=f"run make peers, or set {PEERS_VARIABLE}"
    )


def run_program(
    command: Sequence[str], *, limit_s: float = 900.0, stdin: str = ""
) -> tuple[str, str]:
    """Run a program; return its stdout and stderr.

    Raises:
        PeerError: If it fails, with the last line of its stderr.
    """
    name = Path(command[0]).name
    # Variables named LLAMA_ARG_... are options, too, and would have a hidden effect.
    env = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_ARG_")}
    try:
        done = subprocess.run(
            command,
            input=stdin.encode(),
            capture_output=True,
            env=env,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{name} did not end within {limit_s:g} s") from error
    except OSError as error:
        raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
    stdout, stderr = (part.decode("utf-8", "replace") for part in (done.stdout, done.stderr))
    if done.returncode:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else "it printed nothing"
        raise PeerError(f"{name} failed ({done.returncode}): {reason}")
    return stdout.replace("\r\n", "\n"), stderr


class PeerContender:
    """One of llama.cpp's programs in one setting.

    The session supplies prompts and options, and does not decode. No warm-up is needed: each run of
    a program loads and warms up the models before its clock starts.
    """

    def __init__(
        self, name: str, setting: PeerSetting, draft: Path | None, session: Session
    ) -> None:
        self.name = name
        self._setting = setting
        self._program = find_program(setting.program)
        self._draft = draft
        self._loaded = session

    def answer(self, prompt: str) -> Outcome:
        formatted = self._loaded.prompts.of_text(prompt, chat=None, now=FIXED_NOW)
        vocabulary = self._loaded.target.vocabulary
        # llama.cpp adds this token to the prompt, even if the prompt begins with it.
        bos = ""
        if vocabulary.add_bos:
            bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
        text = formatted.text.removeprefix(bos)
        with tempfile.TemporaryDirectory(prefix="specgen-") as folder:
            file = Path(folder) / "prompt"
            file.write_bytes(text.encode())
            command = [str(self._program), *self._arguments(file, len(formatted.tokens))]
            stdout, stderr = run_program(command)
            for _ in range(_N_TRIES):
                if re.search(_COUNT.format("accept"), stderr):
                    break
                stdout, stderr = run_program(command)
        ends = filter(None, map(vocabulary.control_text, vocabulary.end_tokens()))
        outcome, n_prompt = read_figures(
            stderr, self._setting.program, answer_of(stdout, bos + text, list(ends))
        )
        if n_prompt != len(formatted.tokens):
            raise PeerError(
                f"{self._setting.program} tokenizes the prompt as {n_prompt} tokens, specgen as "
                f"{len(formatted.tokens)}: they cannot be compared"
            )
        return outcome

    def _arguments(self, prompt: Path, n_prompt: int) -> Iterator[str]:
        options = self._loaded.options
        n_tokens = options.generation.max_tokens
        n_threads = str(default_threads())
        yield from ("-m", str(options.target), *self._setting.arguments)
        if self._draft is not None:
            yield from ("-md", str(self._draft))
        # -f would remove the last newline. The programs stop once there are more tokens than -n.
        yield from ("-bf", str(prompt), "--no-escape", "-n", str(n_tokens - 1))
        n_ctx = -(-(n_prompt + n_tokens + _DRAFT_TOKENS) // _CONTEXT_STEP) * _CONTEXT_STEP
        # The prompt must fit a batch.
        yield from ("-c", str(n_ctx), "-b", str(max(n_ctx, 2048)), "-fit", "off")
        yield from ("-t", n_threads, "-tb", n_threads, "--temp", "0")


def read_figures(stderr: str, program: str, text: str) -> tuple[Outcome, int]:
    """Return the figures that a program printed, and the number of tokens of its prompt.

    Raises:
        PeerError: If a figure is missing.
    """

    def last(pattern: str) -> list[float]:
        matches = re.findall(pattern, stderr)
        if not matches:
            raise PeerError(f"{program} printed no figures")
        # Each match is a string, or a tuple if the pattern has several groups.
        groups = matches[-1] if isinstance(matches[-1], tuple) else matches[-1:]
        return [float(number) for number in groups]

    n_prompt, *_ = last(_SPEED.format("encoded"))
    n_tokens, _, tokens_per_s = last(_SPEED.format("decoded"))
    n_timed = n_tokens - 1 if program == LOOKUP else n_tokens
    outcome = Outcome(
        text=text,
        n_tokens=int(n_tokens),
        finish_reason=None,
        tokens_per_s=tokens_per_s * n_timed / n_tokens if n_timed > 0 else None,
        time_to_first_token_s=None,
        n_drafted=int(last(_COUNT.format("drafted"))[0]),
        n_accepted=int(last(_COUNT.format("accept"))[0]),
    )
    return outcome, int(n_prompt)


def answer_of(stdout: str, prompt: str, ends: Sequence[str]) -> str:
    """Return the text after the prompt, or "" if the prompt is not found.

    A program first writes the prompt, token by token, so its spaces may differ.
    """
    body = stdout.removeprefix("\n\n").removesuffix("\n\n").removesuffix("\n\n")
    characters = " *".join(map(re.escape, prompt.replace(" ", "")))
    match = re.match(f" *{characters}", body)
    if match is None:
        return ""
    text = body[match.end() + len(prompt) - len(prompt.rstrip(" ")) :]
    for end in ends:
        text = text.partition(end)[0]
    return text


def peers_of(session: Session, drafts: Mapping[str, Path]) -> list[PeerContender]:
    """Contenders for all settings; a setting that needs a draft has one for each draft."""
    has_mtp = not why_no_mtp(session.options.target)
    contenders = []
    for setting in SETTINGS:
        if setting.needs_mtp and not has_mtp:
            continue
        with_drafts = drafts.items() if setting.needs_draft else [("", None)]
        for name, draft in with_drafts:
            suffix = f" ({name})" if name and len(drafts) > 1 else ""
            contenders.append(
                PeerContender(f"llama.cpp {setting.name}{suffix}", setting, draft, session)
            )
    return contenders


# --- other engines ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Another engine, and how it is run."""

    name: str
    #: Its name in `benchmarks/engine_worker.py`, which is also the option that names its Python.
    engine: str
    #: Its settings in `benchmarks/engine_worker.py`.
    choices: Mapping[str, Any]


ENGINE_SETTINGS = (
    EngineSetting("OpenVINO", "openvino", {"prompt_lookup": False}),
    EngineSetting("OpenVINO prompt lookup", "openvino", {"prompt_lookup": True}),
    EngineSetting("ik_llama.cpp", "ik-llama", {"repack": False}),
    EngineSetting("ik_llama.cpp repacked", "ik-llama", {"repack": True}),
)


class EngineContender:
    """Another engine, in a separate process.

    As with llama.cpp's programs, a session supplies the prompts.
    """

    def __init__(self, name: str, worker: EngineWorker, session: Session) -> None:
        self.name = name
        self._worker = worker
        self._loaded = session

    def answer(self, prompt: str) -> Outcome:
        """Warm up, and answer.

        Raises:
            WorkerError: If the process ended.
        """
        self._worker.warm_up(self._tokens_of(WARM_UP_PROMPT))
        figures = self._worker.answer(prompt, self._tokens_of(prompt))
        vocabulary = self._loaded.target.vocabulary
        token_ids = tuple(token for token in figures["token_ids"] if not vocabulary.is_end(token))
        text = b"".join(map(vocabulary.token_bytes, token_ids)).decode("utf-8", "replace")
        return Outcome(
            text=text,
            n_tokens=figures["n_tokens"],
            finish_reason=None,
            tokens_per_s=figures["tokens_per_s"],
            time_to_first_token_s=figures["time_to_first_token_s"],
            token_ids=token_ids,
        )

    def _tokens_of(self, prompt: str) -> tuple[int, ...]:
        return tuple(self._loaded.prompts.of_text(prompt, now=FIXED_NOW).tokens)


def engines_of(
    session: Session,
    pythons: Mapping[str, Path | None],
    stack: contextlib.ExitStack,
) -> Iterator[EngineContender]:
    """Yield contenders for the engines that are installed, and report each that is not.

    Args:
        session: The session whose target the engines load.
        pythons: The Python of each engine's environment; None for an engine to leave out.
        stack: The stack that ends the processes.
    """
    options = session.options
    for setting in ENGINE_SETTINGS:
        python = pythons[setting.engine]
        if python is None:
            skip(setting.name, f"there is no --{setting.engine}")
            continue
        settings = {
            "target": str(options.target),
            "max_tokens": options.generation.max_tokens,
            "n_threads": default_threads(),
            "n_ctx": _ENGINE_N_CTX,
            **setting.choices,
        }
        command = WorkerCommand(setting.engine, python, checkout=None)
        try:
            worker = stack.enter_context(running_worker(command, settings))
        except WorkerError as error:
            skip(setting.name, error.message)
            continue
        print(f"{setting.name}: version {worker.about['version']}", file=sys.stderr)
        yield EngineContender(setting.name, worker, session)


def skip(name: str, why: str) -> None:
    """Report that a contender is left out."""
    print(f"{name} was skipped: {why}", file=sys.stderr)


# --- the command ------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__, max_tokens=128, drafts=True)
    parser.add_argument("--prompts", type=Path, help="default: the prompts of `specgen bench`")
    parser.add_argument("-N", "--count", type=int, help="prompts per category")
    for engine in dict.fromkeys(setting.engine for setting in ENGINE_SETTINGS):
        parser.add_argument(f"--{engine}", type=Path, help="the Python of the engine's environment")
    arguments = parser.parse_args()
    prompts = bench_prompts(arguments.prompts, arguments.count)
    kernels = choose_kernels(wanted_in(os.environ), cache_folder()).label
    with contextlib.ExitStack() as stack:
        compare(_contenders(arguments, stack), prompts, kernels, arguments.json)


def _contenders(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[Contender]:
    """Return plain decoding, specgen with each draft, and all other programs that are there."""
    plain = opened(arguments.target, "none", arguments.max_tokens)
    others: list[PeerContender | EngineContender] = []
    try:
        others += peers_of(plain, {path.name: path for path in arguments.draft})
    except PeerError as error:
        skip("llama.cpp", f"{error.message} ({error.hint})")
    others += engines_of(
        plain, {"openvino": arguments.openvino, "ik-llama": arguments.ik_llama}, stack
    )
    if not others:
        sys.exit("there is nothing to compare with")
    sources: dict[str, DraftSource] = {path.name: path for path in arguments.draft} | {
        "ngram": "ngram"
    }
    own = [contender_of("plain", plain)]
    for draft, source in sources.items():
        own.append(contender_of(draft, opened(arguments.target, source, arguments.max_tokens)))
    return [
        *map(warmed_up_each_time, own),
        *(Contender(0.0, each.name, each.answer) for each in others),
    ]


def warmed_up_each_time(contender: Contender) -> Contender:
    """Return the contender with a warm-up before each of its turns."""
    return replace(contender, answer=partial(_warm_up_and_answer, contender))


def _warm_up_and_answer(contender: Contender, prompt: str) -> Outcome:
    contender.warm_up()
    return contender.answer(prompt)


def compare(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    kernels: str,
    file: Path | None,
) -> None:
    """Print the lines of `specgen bench`, and write all results as JSON."""
    runs = Runs()
    take_turns(contenders, prompts, runs, progress=show_progress)
    for failure in runs.failures:
        print(f"{failure.contender}: {failure.message}", file=sys.stderr)
    figures = figures_of(runs.results)
    for line in bench_lines(figures):
        print(line)
    document = {
        "command": command_line("peers", sys.argv[1:]),
        "kernels": kernels,
        "figures": as_json(figures),
        "results": as_json(runs.results),
    }
    write_json(file, document)


if __name__ == "__main__":
    main()
