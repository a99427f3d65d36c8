"""`specgen serve` as a process: its address, its end, and the options that it rejects."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specgen.errors import MemoryLimitError, ModelFileError
from tests.helpers.cli import Specgen, complaint, spawn
from tests.helpers.server import PATIENCE_S, wait_until
from tests.helpers.sessions import folder_with
from tests.helpers.wrong_files import WRONG_FILES
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyEagle, write_tiny_eagle

PROMPT = "the cat is in the house of"


TARGET = TinyConfig(logit_scale=6.0, unprintable_scale=0.0, n_ctx_train=8192)
models = folder_with(target=TARGET, draft=TARGET.draft(0.05))


def started(
    models: Path, *arguments: str
) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Start a server; return its process and address."""
    names = ("-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf"))
    return listening(*names, *arguments)


@contextlib.contextmanager
def listening(*arguments: str, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = spawn("serve", "--port", port, *arguments, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), process.communicate()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """End a server with SIGTERM; return what it wrote."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert process.stderr is not None
    return process.stderr.read()


@contextlib.contextmanager
def begun(url: str, **body: Any) -> Iterator[Iterator[str]]:
    """Return the lines of a stream that has begun."""
    asked = {"prompt": "x", "ignore_eos": True, "stream": True, **body}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE_S) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def n_tokens(lines: Iterator[str]) -> int:
    """Check that a stream ends correctly; return the length of its answer."""
    *_, last, done = lines
    assert done == "data: [DONE]"
    n: int = json.loads(last.removeprefix("data: "))["timings"]["predicted_n"]
    return n


def test_answers_are_those_of_run(models: Path, specgen: Specgen) -> None:
    options = ["-n", "24"]
    names = ["-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf"), "-q", *options]
    greedy = specgen("run", PROMPT, *names).out
    seeded = specgen("run", PROMPT, *names, "--temp", "0.8", "--seed", "3").out
    with started(models, *options) as (process, url):
        for fields, expected in (({}, greedy), ({"temperature": 0.8, "seed": 3}, seeded)):
            body = {"prompt": PROMPT, **fields}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["text"] == expected
        assert f"a chat for the browser: {url}; OpenAI's API: {url}/v1" in ended(process)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
class TestEnding:
    def test_answers_in_the_making_are_finished_and_no_new_ones_taken(self, models: Path) -> None:
        with started(models, "-c", "8192") as (process, url):
            with begun(url, max_tokens=2000) as lines:
                process.send_signal(signal.SIGTERM)

                def refused() -> bool:
                    try:
                        httpx.get(f"{url}/health", timeout=1.0)
                    except httpx.TransportError:
                        return True
                    return False

                wait_until(refused, "the end of listening")
                assert n_tokens(lines) == 2000
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None
            assert "waiting for 1 answer to finish" in process.stderr.read()

    @pytest.mark.parametrize("how", ["the time is over", "a second signal"])
    def test_answers_that_take_too_long_are_cut(self, models: Path, how: str) -> None:
        drain_s = "0.1" if how == "the time is over" else "600"
        with started(models, "-c", "8192", "--drain-s", drain_s) as (process, url):
            with begun(url) as lines:
                process.send_signal(signal.SIGINT)
                if how == "a second signal":
                    assert process.stderr is not None
                    while "waiting for 1 answer" not in process.stderr.readline():
                        pass
                    process.send_signal(signal.SIGINT)
                assert n_tokens(lines) < 8000
            assert process.wait(PATIENCE_S) == 0


def test_a_port_that_is_taken_is_an_error(models: Path, specgen: Specgen) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = specgen("serve", "-m", models / "target.gguf", "--port", port)
    assert f"cannot listen on 127.0.0.1, port {port}: " in complaint(result, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (("--host", host), f"--host {host}: anyone who reaches")
            for host in ("0.0.0.0", "::", "192.0.2.1", "example.org")
        ),
        (("--cors-origin", "example.org"), "--cors-origin example.org: not an origin"),
        (("--memory", "2GB"), "--memory needs --models"),
        (("--memory", "much"), "'much' is not a size"),
        (("--memory", "9" * 400), "--memory: the size is too large"),
        (("--models", "."), "--target"),
        (("--models", ".", "--alias", "a"), "--alias"),
    ],
)
def test_invalid_options_are_refused(
    models: Path, specgen: Specgen, arguments: tuple[str, ...], said: str
) -> None:
    result = specgen("serve", "-m", models / "target.gguf", *arguments)
    assert said in complaint(result, 2)
    assert ("--api-key-file" in result.err) == ("--host" in arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n\n", "no key"),
        (b"good\ntwo words\n", "line 2"),
        (b"\xff", "not UTF-8"),
        ("clé".encode(), "line 1 is not a valid key"),
    ],
)
def test_a_file_without_valid_keys_is_refused(
    models: Path, specgen: Specgen, tmp_path: Path, content: bytes, said: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    result = specgen("serve", "-m", models / "target.gguf", "--api-key-file", keys)
    assert said in complaint(result, 2)


def test_without_the_extra_the_error_names_it(
    models: Path, specgen: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "specgen.serve.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    result = specgen("serve", "-m", models / "target.gguf")
    message = complaint(result, 2)
    assert "starlette" in message
    assert "specgen-gguf[server]" in result.err


# --- several models -------------------------------------------------------------------------------


def test_models_of_a_file_answer_as_if_alone(models: Path, specgen: Specgen) -> None:
    """Paths are relative to the file, and an entry's options override the command line's."""
    file = models / "served.toml"
    file.write_text(
        """
        [pair]
        target = "target.gguf"
        draft = "draft.gguf"
        stop = ["zebra", "quagga"]

        ["the/other"]
        model = "draft.gguf"
        draft = "none"
        max-tokens = 7
        ignore-eos = true
        parallel = 1
        """
    )
    target, draft = models / "target.gguf", models / "draft.gguf"
    expected = {
        "pair": specgen("run", PROMPT, "-m", target, "-md", draft, "-q", "-n", "24").out,
        "the/other": specgen(
            "run", PROMPT, "-m", draft, "-md", "none", "-q", "-n", "7", "--ignore-eos"
        ).out,
    }
    # One of them fits.
    with listening("--models", str(file), "--memory", "240MiB", "-n", "24") as (process, url):
        for name in ("pair", "the/other", "pair"):
            body = {"model": name, "prompt": PROMPT}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["text"] == expected[name]
        assert httpx.get(f"{url}/props?model=pair").json()["draft"] == "draft.gguf"
        assert "total_slots" not in httpx.get(f"{url}/props?model=the/other").json()
        said = ended(process)
    assert said.count("note: unloaded pair") == 1
    assert "note: the/other: 1 answer at once" in said


def test_all_usable_models_in_a_folder_are_served(models: Path, tmp_path: Path) -> None:
    """All that can be targets or make embeddings are served; other files are left out."""
    (tmp_path / "deeper").mkdir()
    for name in ("target.gguf", "deeper/target.gguf", "deeper/draft.gguf"):
        (tmp_path / name).symlink_to(models / Path(name).name)
    config = TinyConfig()
    write_tiny_eagle(tmp_path / "eagle.gguf", config, TinyEagle())
    write_tiny_model(tmp_path / "bert.gguf", TinyConfig(architecture="bert", n_ctx_train=64))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    (tmp_path / "part-00002-of-00002.gguf").write_bytes(b"GGUF")
    for name, kind in WRONG_FILES.items():
        kind.write(tmp_path / f"wrong {name}.gguf")
    with listening("--models", str(tmp_path), "-n", "5") as (process, url):
        served = httpx.get(f"{url}/v1/models").json()["data"]
        assert [each["id"] for each in served] == ["bert", "target", "draft", "deeper/target"]
        asked = {"model": "bert", "input": "x"}
        answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=PATIENCE_S).json()
        assert len(answer["data"][0]["embedding"]) == config.n_embd
        said = ended(process).splitlines()
        left_out = [line for line in said if line.startswith("note: not served: ")]
    wrong = [line for line in left_out if "wrong " in line]
    for name, kind in WRONG_FILES.items():
        assert any(f"wrong {name}.gguf: " in line and kind.said in line for line in wrong), name
    others = [line for line in left_out if line not in wrong]
    assert [("eagle.gguf" in line, "other.gguf" in line) for line in others] == [
        (True, False),
        (False, True),
    ]


def test_templates_that_are_missing_or_invalid_are_noted_at_the_start(tmp_path: Path) -> None:
    invalid = "{% for m in messages %}\n{{ m.content }"
    file = write_tiny_model(tmp_path / "broken.gguf", TinyConfig(chat_template=invalid))
    for arguments in (("-m", str(file)), ("--models", str(tmp_path))):
        with listening(*arguments) as (process, _):
            said = ended(process).splitlines()
        expected = "note: broken: its chat template is not valid"
        assert [line.startswith(expected) for line in said].count(True) == 1
    plain = write_tiny_model(tmp_path / "plain.gguf", TinyConfig())
    with listening("-m", str(plain)) as (process, _):
        assert "chatml is used; choose another with --chat-template" in ended(process)


def test_an_embedding_model_can_be_served_alone(tmp_path: Path, specgen: Specgen) -> None:
    file = write_tiny_model(tmp_path / "bert.gguf", TinyConfig(architecture="bert", n_ctx_train=64))
    refused = complaint(specgen("serve", "-m", file, "-md", file), 2)
    assert "leave out --draft" in refused
    with listening("-m", str(file), "-c", "32") as (process, url):
        body = {"model": "any", "input": "a " * 40}
        refused = httpx.post(f"{url}/v1/embeddings", json=body, timeout=PATIENCE_S).text
        assert "but the context has 32" in refused
        ended(process)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\ntarget =", "is not TOML"),
        ("", "has no models"),
        ("a = 3", "'a' is not in the table of a model"),
        ("[a]\nparallel = 2", "[a]: target is missing"),
        ("[a]\ntarget = 'target.gguf'\nport = 3", "[a]: port: a model has no such option"),
        (
            "[a]\ntarget = 'target.gguf'\nkernels = 'auto'",
            "[a]: kernels: a model has no such option",
        ),
        (
            "[a]\ntarget = 'target.gguf'\nctx-size = 'long'",
            "[a]: ctx-size: give a whole number, not 'long'",
        ),
        ("[a]\ntarget = 'target.gguf'\nlearn = true", "[a]: --learn uses one user's texts"),
    ],
)
def test_a_wrong_file_of_models_is_refused(
    models: Path, specgen: Specgen, text: str, said: str
) -> None:
    file = models / "wrong.toml"
    file.write_text(text)
    message = complaint(specgen("serve", "--models", file), 2)
    assert str(file) in message
    assert said in message


def test_a_model_that_can_never_be_loaded_is_refused_at_the_start(
    models: Path, specgen: Specgen
) -> None:
    file = models / "large.toml"
    file.write_text("[a]\ntarget = 'target.gguf'\ndraft = 'none'")
    result = specgen("serve", "--models", file, "--memory", "90MiB")
    assert f"{file}: [a]: a needs about 10" in complaint(result, MemoryLimitError.exit_code)
    file.write_text("[a]\ntarget = 'missing.gguf'")
    result = specgen("serve", "--models", file)
    assert f"{file}: [a]: " in complaint(result, ModelFileError.exit_code)
