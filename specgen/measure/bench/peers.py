"""Run llama.cpp's own speculative programs as contenders; `make peers` builds them.

The meaning of their figures, read from examples/speculative-simple and examples/lookup in
llama-cpp-python 0.3.36:

- `llama-speculative-simple` starts its clock when target and draft model have decoded the prompt except its
  last token, and counts all later tokens, the first one too. The time includes the decode of that last token
  (with the first draft), drafting, the draft model's second decode of each verified batch, sampling and text;
  it excludes loading and warming up. The printed figure is the tokens of all rounds over their time, like
  specgen's, and is used as printed.
- `llama-lookup` decodes the whole prompt before its clock starts, so the first token costs no decode: the
  figure here is the n - 1 other tokens over the time.
- Both count the token that ends the text, as specgen does. They also count accepted drafted tokens after it:
  at most a draft too many, if an answer ends by itself.
- On a GPU they may start the clock before the prompt's decode has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.options import ContextOptions, SamplerOptions

if TYPE_CHECKING:
    from specgen.session.loaded_models import Models
    from specgen.session.prompts import Prompt

#: If it is set, programs are searched in this folder only.
PEERS_VARIABLE = "SPECGEN_PEERS"
SIMPLE = "llama-speculative-simple"
LOOKUP = "llama-lookup"

_POLL_S = 0.2
_CONTEXT_STEP = 256
#: Room for the longest drafts (48 tokens or 64, by default).
_DRAFT_ROOM = 64
#: Options of `SamplerOptions` in llama.cpp's spelling; the others cannot be passed on.
_SAMPLER_FLAGS = {"top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p"}

_NUMBER = r"(-?\d[\d.]*|-?inf|-?nan)"
_SPEED = rf"{{}}\s+{_NUMBER} tokens in\s+{_NUMBER} seconds, speed:\s+{_NUMBER} t/s"
_COUNT = rf"\bn_{{}}\s*=\s*{_NUMBER}"
#: The last of the figures. The last output is sometimes lost, since the programs do not wait for the thread
#: that writes their log: very small models lose it often.
_ENDED = re.compile(_COUNT.format("accept"))
N_TRIES = 3
#: A logged error, after time and level.
_ERROR_LINE = re.compile(r"[\d.]+ E (.*)")


class PeerError(SpecgenError):
    """Another program is missing, failed, took too long, or refuses the pair of models."""


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A program and its way to draft, in its own options."""

    name: str
    arguments: tuple[str, ...]
    program: str = SIMPLE
    needs_draft: bool = False
    needs_mtp: bool = False


def _draft(name: str, *arguments: str) -> PeerSetting:
    return PeerSetting(name, ("--spec-type", "draft-simple", *arguments), needs_draft=True)


def _mtp(n_max: int) -> PeerSetting:
    arguments = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(n_max))
    return PeerSetting(f"mtp {n_max}", arguments, needs_mtp=True)


def _ngram(kind: str, sizes: tuple[int, int] | None = None) -> tuple[str, ...]:
    if sizes is None:
        return ("--spec-type", kind)
    size_flags = (f"--spec-{kind}-size-n", str(sizes[0]), f"--spec-{kind}-size-m", str(sizes[1]))
    return ("--spec-type", kind, *size_flags)


#: The same loop without drafts. The program refuses to run without a way to draft; here drafts of 1 token are
#: dropped, since they are shorter than the n-grams of 1024 tokens that it looks for.
PLAIN = PeerSetting("plain", _ngram("ngram-simple", (1024, 1)))
_BOTH = (
    *("--spec-type", "ngram-simple,draft-simple", "--spec-draft-n-max", "3"),
    *_ngram("ngram-simple", (4, 8))[2:],
)
#: llama.cpp's defaults (a draft of 3 tokens, ngram-simple 12/48, the other kinds unchanged), and what people
#: set to draft more. No setting was the best twice in a row.
SETTINGS = (
    _draft("draft 3", "--spec-draft-n-max", "3"),
    _draft("draft 8, p-min 0.75", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75"),
    _draft("draft 16", "--spec-draft-n-max", "16"),
    PeerSetting("ngram-simple 4/8, draft 3", _BOTH, needs_draft=True),
    PeerSetting("ngram-simple 4/8", _ngram("ngram-simple", (4, 8))),
    PeerSetting("ngram-simple 12/48", _ngram("ngram-simple", (12, 48))),
    PeerSetting("ngram-map-k", _ngram("ngram-map-k")),
    PeerSetting("ngram-map-k4v", _ngram("ngram-map-k4v")),
    PeerSetting("ngram-mod", _ngram("ngram-mod")),
    PeerSetting("ngram-cache", _ngram("ngram-cache")),
    PeerSetting("lookup 8", ("--spec-draft-n-max", "8"), program=LOOKUP),
    *map(_mtp, (1, 2, 3, 5)),
)


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt as text, with its chat template applied; names of control tokens are read as these tokens.

    `n_tokens` is the number of tokens that specgen reads. `bos` is the text of the token that llama.cpp puts
    before every prompt of this model, if there is one; `text` may begin with it or not. `ends` has the texts
    of the tokens that end an answer; an answer is cut at the first of them.
    """

    text: str
    n_tokens: int
    bos: str = ""
    ends: tuple[str, ...] = ()


def peer_prompt(loaded: Models, prompt: Prompt) -> PeerPrompt:
    """Return a prompt for another program."""
    vocabulary = loaded.target.vocabulary
    bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
    ends = tuple(filter(None, map(vocabulary.control_text, vocabulary.end_tokens())))
    return PeerPrompt(prompt.text, len(prompt.tokens), bos if vocabulary.add_bos else "", ends)


@dataclass(frozen=True, slots=True)
class PeerJob:
    """The job of a peer: at least `n_tokens` tokens, 2 or more, unless the text ends before."""

    target: Path
    prompt: PeerPrompt
    n_tokens: int
    n_threads: int
    draft: Path | None = None
    sampler: SamplerOptions = SamplerOptions()
    target_context: ContextOptions = ContextOptions()
    draft_context: ContextOptions = ContextOptions()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The result of a peer. `tokens_per_s` compares with specgen's (see the module); it is None if there is
    no second token. `seconds` is the time in it. `text` is None if the answer could not be separated from the
    prompt before it; it may have some tokens more than were asked for. Counts are tokens."""

    text: str | None
    n_tokens: int
    tokens_per_s: float | None
    seconds: float
    n_prompt_tokens: int
    prompt_s: float
    n_drafted: int
    n_accepted: int
    command: tuple[str, ...]
    token_ids: tuple[int, ...] | None = None


def find_program(name: str, folder: Path | None = None) -> Path:
    """Return a peer's path: in `folder`, else in $SPECGEN_PEERS, else beside this Python's own files, where
    `make peers` puts it. Raise `PeerError`."""
    chosen = folder or (Path(value) if (value := os.environ.get(PEERS_VARIABLE)) else None)
    place = (chosen or Path(sys.prefix) / "peers").expanduser()
    file = f"{name}.exe" if os.name == "nt" else name
    for path in (place / file, place / "bin" / file):
        if path.is_file():
            return path
    raise PeerError(f"there is no {name} in {place}", hint=f"make peers, or set {PEERS_VARIABLE}")


def run_peer(
    program: Path,
    setting: PeerSetting,
    job: PeerJob,
    *,
    limit_s: float = 900.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> PeerResult | None:
    """Let a program answer; None if `interrupted` returned True and the program was killed.

    Raise `PeerError` with the program's own words if it fails, and if it takes longer than `limit_s`
    seconds or reads the prompt as another number of tokens than specgen.
    """
    with tempfile.TemporaryDirectory(prefix="specgen-") as folder:
        file = Path(folder) / "prompt"
        # llama.cpp puts this token before the prompt, even if the prompt begins with it.
        file.write_bytes(job.prompt.text.removeprefix(job.prompt.bos).encode())
        command = (str(program), *arguments_of(setting, job, file))
        stdout = stderr = ""
        for _ in range(N_TRIES):
            output = run_program(command, limit_s=limit_s, interrupted=interrupted)
            if output is None:
                return None
            stdout, stderr = output
            if _ENDED.search(stderr):
                break
    result = parse_output(stdout, stderr, setting.program, job.prompt, command)
    if result.n_prompt_tokens != job.prompt.n_tokens:
        raise PeerError(
            f"{setting.program} reads the prompt as {result.n_prompt_tokens} tokens, "
            f"specgen as {job.prompt.n_tokens}: not to be compared"
        )
    return result


def arguments_of(setting: PeerSetting, job: PeerJob, prompt: Path) -> Iterator[str]:
    """Yield the program's arguments. Raise `PeerError` for options that cannot be passed on."""
    yield from ("-m", str(job.target), *setting.arguments)
    if setting.needs_draft:
        if job.draft is None:
            raise PeerError(f"{setting.name}: there is no draft model")
        yield from ("-md", str(job.draft), *_context_flags(job.draft_context, "d"))
    # -f would remove the last newline; escapes in a prompt are read unless --no-escape is given.
    yield from ("-bf", str(prompt), "--no-escape")
    if job.n_tokens < 2:
        raise PeerError(f"{job.n_tokens} tokens are too few to measure")
    # They stop when there are more tokens than this.
    yield from ("-n", str(job.n_tokens - 1))
    n_ctx = job.target_context.n_ctx or job.prompt.n_tokens + job.n_tokens + _DRAFT_ROOM
    n_ctx = -(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP
    # The prompt must fit a batch; 2048 is the default.
    yield from ("-c", str(n_ctx), "-b", str(max(n_ctx, 2048)), "-fit", "off")
    n_threads_batch = job.target_context.n_threads_batch or job.n_threads
    yield from ("-t", str(job.n_threads), "-tb", str(n_threads_batch))
    yield from ("-fa", job.target_context.flash_attention, *_context_flags(job.target_context))
    yield from sampler_flags(job.sampler)
    if job.ignore_eos:
        yield "--ignore-eos"


def _context_flags(options: ContextOptions, suffix: str = "") -> Iterator[str]:
    n_gpu_layers = "all" if options.n_gpu_layers < 0 else str(options.n_gpu_layers)
    yield from (f"-ngl{suffix}", n_gpu_layers)
    yield from (f"-ctk{suffix}", options.cache_type_k, f"-ctv{suffix}", options.cache_type_v)


def sampler_flags(options: SamplerOptions) -> Iterator[str]:
    """Yield the samplers as llama.cpp's options. Raise `PeerError` for those that cannot be passed on."""
    passed = {"temperature", "seed", *_SAMPLER_FLAGS}
    for name in (field.name for field in fields(SamplerOptions)):
        if name not in passed and getattr(options, name) != getattr(SamplerOptions(), name):
            raise PeerError(f"{name} cannot be passed on to llama.cpp's programs")
    if options.greedy:
        yield from ("--temp", "0")
        return
    yield from ("--temp", f"{options.temperature:g}")
    for name, flag in _SAMPLER_FLAGS.items():
        yield from (flag, f"{getattr(options, name):g}")
    if options.seed >= 0:
        yield from ("--seed", str(options.seed))


def parse_output(
    stdout: str, stderr: str, program: str, prompt: PeerPrompt, command: tuple[str, ...]
) -> PeerResult:
    """Read the figures in a program's output. Raise `PeerError` if its figures are not there."""
    encoded, decoded = (_SPEED.format(what) for what in ("encoded", "decoded"))
    try:
        n_prompt_tokens, prompt_s, _ = _last(encoded, stderr)
        n_tokens, seconds, tokens_per_s = _last(decoded, stderr)
        n_drafted, n_accepted = (_last(_COUNT.format(n), stderr)[0] for n in ("drafted", "accept"))
    except ValueError as error:
        raise PeerError(f"{program} tells no figures: {_last_words(stderr)}") from error
    n_timed = n_tokens - 1 if program == LOOKUP else n_tokens
    return PeerResult(
        text=_answer(stdout, prompt),
        n_tokens=int(n_tokens),
        tokens_per_s=tokens_per_s * n_timed / n_tokens if n_timed > 0 else None,
        seconds=seconds,
        n_prompt_tokens=int(n_prompt_tokens),
        prompt_s=prompt_s,
        n_drafted=int(n_drafted),
        n_accepted=int(n_accepted),
        command=command,
    )


def _last(pattern: str, text: str) -> list[float]:
    """Return the numbers in the last match. Raise `ValueError` if there is none."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        raise ValueError(pattern)
    return [float(number) for number in matches[-1].groups()]


def _answer(stdout: str, prompt: PeerPrompt) -> str | None:
    """Return the text after the prompt. The program writes the prompt first, token by token, so its spaces
    may differ from those of the text."""
    body = stdout.replace("\r\n", "\n").removeprefix("\n\n")
    body = body.removesuffix("\n\n").removesuffix("\n\n")
    echo = prompt.bos + prompt.text.removeprefix(prompt.bos)
    if body.startswith(echo):
        text = body[len(echo) :]
    else:
        characters = map(re.escape, echo.replace(" ", ""))
        if (match := re.match(" *" + " *".join(characters), body)) is None:
            return None
        text = body[match.end() + len(echo) - len(echo.rstrip(" ")) :]
    for end in prompt.ends:
        text = text.partition(end)[0]
    return text


def run_program(
    command: Sequence[str],
    *,
    limit_s: float,
    interrupted: Callable[[], bool] = lambda: False,
    stdin: str = "",
) -> tuple[str, str] | None:
    """Run a program and return its stdout and stderr; None if `interrupted` returned True. Raise
    `PeerError`. The program never outlives this call."""
    name, pipe = Path(command[0]).name, subprocess.PIPE
    # LLAMA_ARG_... variables are options too, and would have a hidden effect.
    env = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_ARG_")}
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
    except OSError as error:
        raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        try:
            output = _wait(process, name, stdin.encode(), limit_s, interrupted)
        finally:
            process.kill()
    # Ctrl-C reaches the program too.
    if output is None or interrupted():
        return None
    stdout, stderr = (part.decode("utf-8", "replace") for part in output)
    if process.returncode:
        raise PeerError(f"{name} {_end(process.returncode)}: {_last_words(stderr)}")
    return stdout, stderr


def _wait(
    process: subprocess.Popen[bytes],
    name: str,
    stdin: bytes,
    limit_s: float,
    interrupted: Callable[[], bool],
) -> tuple[bytes, bytes] | None:
    data = stdin or None
    for _ in range(math.ceil(limit_s / _POLL_S)):
        if interrupted():
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(data, timeout=_POLL_S)
        data = None
    raise PeerError(f"{name} did not end within {limit_s:g} s and was killed")


def _end(code: int) -> str:
    if code > 0:
        return f"failed ({code})"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_words(stderr: str) -> str:
    """Return the line with the cause: a C++ exception, else the last line logged as an error, else the first
    one that mentions an error, else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("warning:")]
    thrown = [line.removeprefix("what():").strip() for line in lines if line.startswith("what():")]
    logged = [match[1] for line in lines if (match := _ERROR_LINE.fullmatch(line))]
    said = [line for line in lines if line.lower().startswith("error")]
    return (thrown[-1:] or logged[-1:] or said[:1] or lines[-1:] or ["it does not say why"])[0]
