"""Run llama.cpp's own tests of its server against `specgen serve`.

    python -m tests.long_runs.llama_cpp_tests LLAMA_CPP [--models FOLDER] [-k WORDS]

LLAMA_CPP is the unpacked source of llama.cpp, for example `vendor/llama.cpp` in the source
distribution of llama-cpp-python. The tests need small models of the Hugging Face hub. They are
downloaded, unless they are in FOLDER (`stories260K.gguf` for a repository with such a name); tests
whose model cannot be downloaded are skipped. Prints a line for each test. `DIFFERENT` lists the
tests that fail on purpose, with the reasons; the exit code is 1 if any other test fails, or if none
could run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import httpx
import pytest

#: Files of tests of what specgen does not have.
LEFT_OUT = {
    "test_compat_gcp": "Vertex AI's own path",
    "test_kv_keep_only_active": "reads llama.cpp's log",
    "test_lora": "adapters of weights",
    "test_mcp_servers": "a client of MCP in the server",
    "test_proxy": "a proxy for web pages",
    "test_rerank": "ranking of documents",
    "test_router": "several models are served by --models, without llama.cpp's own paths",
    "test_sleep": "weights are dropped by --models alone",
    "test_slot_save": "the prefix cache is kept without being told",
    "test_stream": "streams that go on after a client is gone",
    "test_tools_builtin": "tools that run in the server",
    "test_vision_api": "images",
}
#: Tests that fail on purpose, and why.
DIFFERENT = {
    "basic.*(addresses|props|slots|no_ui|aliases)": (
        "one address, one name; /slots and / are always enabled"
    ),
    "chat.*best book-8-. blue": "a text that is no Jinja is a file's name",
    "(chat|tool_call).*(completion_stream|timings_per_token|logprobs_stream|STREAMED)": (
        "the first content of a stream is empty, as OpenAI's is"
    ),
    "chat.*(test_chat_template|verbose)": "/apply-template shows the prompt, a response does not",
    "chat.*apply_chat_template": "Command R's template is in its own files",
    "chat.*response_format": "unless strict, what cannot be enforced is a warning",
    "chat.*messages7": "of two last answers the last one goes on",
    "(chat|ctx).*(exceeded|long_prompt)": (
        "the error has OpenAI's type and code, and llama.cpp's figures"
    ),
    "chat.*return_progress": "pieces of a prompt have another size",
    "compat_anthropic.*basic": "answers have timings beside Anthropic's fields",
    "compat_anthropic.*(image|vision)": "an image is named as left out",
    "compat_anthropic.*empty": "a conversation without a turn is refused",
    "compat_oai_responses.*telemetry": "timings are in the last event alone",
    r"completion.*completion_stream\[": "no adaptive sampler in the settings",
    "emb.*(mixed|same_as)": "an input has no parts, as messages have them, and is not empty",
    "completion.*n_probs_post": "probabilities are those before sampling",
    "completion.*response_fields": "the prompt is what was sent, without <s>",
    ".*ctx_shift": "an answer ends where the context is full, whose last token needs no cell",
    "embedding.*(pooling_none|too_long)": "a vector for each input, and errors in other words",
    "ignore_eos.*populates": "settings do not list the ends as biases",
    "metrics": "figures have names of our own, /metrics is always there",
    "security.*(assets|cors)": "the page's files are below /page, other origins need --cors-origin",
    "template.*(R1|QwQ).*off": "enable_thinking is all that the template is told",
    "template.*add_generation_prompt": "a prompt ends where the answer begins",
    "speculative.*(draft|synth)": "a draft is used where it pays, by measured costs",
    "speculative.*slot_ctx": "a longer prompt with a vocabulary of 512",
}
#: What a text that was drawn has to have: words. Other random numbers draw other ones.
_DRAWN = re.compile(r"[\w |()+'^]+|.*Suddenly.*")
#: The exit code of a model that cannot be fetched.
FETCH_FAILED = 7


class Folder:
    """Where models are, by the names that tests give them."""

    def __init__(self, folder: Path | None) -> None:
        self.files = list(folder.glob("*.gguf")) if folder is not None else []
        #: Repositories that could not be fetched, so that only one test waits for each.
        self.unavailable: set[str] = set()

    def options(self, server: Any) -> list[str]:
        asked = f"{server.model_hf_repo}/{server.model_hf_file}"
        if (file := self.find(asked)) is not None:
            return ["-m", str(file)]
        if server.model_hf_repo is None:
            pytest.skip("a server without models")
        if server.model_hf_repo in self.unavailable:
            pytest.skip("its model cannot be fetched")
        more = ["--hf-file", server.model_hf_file] if server.model_hf_file else []
        return ["-hf", server.model_hf_repo, *more]

    def find(self, name: str) -> Path | None:
        names = [file for file in self.files if file.stem.lower() in name.lower()]
        return max(names, key=lambda file: len(file.stem), default=None)

    def fetch(self, address: str, _output: str | None = None) -> str:
        """Take the place of `download_file`."""
        if (file := self.find(address)) is None:
            pytest.skip(f"{address} is not in the folder of models")
        return str(file)


def start(server: Any, folder: Folder) -> None:
    """Take the place of `ServerProcess.start`: start `specgen serve` with the options of a test."""
    n_slots = server.n_slots or 4
    n_ctx = (server.n_ctx or 2048) // (1 if server.kv_unified else n_slots)
    n_predict = server.n_predict or -1
    arguments = [*folder.options(server), "-c", n_ctx, "-t", 1, "-q", "--drain-s", 0]
    arguments += ["--host", server.server_host, "--port", server.server_port]
    if not server.server_embeddings:
        arguments += ["-md", server.model_draft or "none", "-np", n_slots, "-n", n_predict]
        arguments += ["--temp", server.temperature, "--seed", server.seed]
    named = {
        "--batch-size": server.n_batch,
        "--alias": server.model_alias,
        "--cors-origin": server.cors_origins,
        "--chat-template": server.chat_template_file or server.chat_template,
        "--draft-max": server.spec_draft_n_max,
        "--draft-min": server.spec_draft_n_min,
    }
    if server.reasoning == "off":
        named["--chat-template-kwargs"] = '{"enable_thinking": false}'
    for name, value in named.items():
        arguments += [name, value] if value else []
    if server.api_key:
        keys = Path(tempfile.mkdtemp()) / "keys"
        keys.write_text(server.api_key)
        arguments += ["--api-key-file", keys]
    command = [sys.executable, "-m", "specgen", "serve", *map(str, arguments)]
    server.process = subprocess.Popen(command, env={**os.environ, "SPECGEN_KERNELS": "llama.cpp"})
    importlib.import_module("utils").server_instances.add(server)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if server.process.poll() == FETCH_FAILED:
            folder.unavailable.add(server.model_hf_repo)
            pytest.skip("its model cannot be fetched")
        if server.process.poll() is not None:
            raise RuntimeError(f"it ended with {server.process.returncode}: {command}")
        try:
            address = f"http://{server.server_host}:{server.server_port}/health"
            if httpx.get(address, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise TimeoutError("it did not start")


class Lines:
    """Prints a line for each test, and counts them."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("passed", "differs on purpose", "skipped", "failed"), 0)
        self.is_right = True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests of large models."""
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("unit/test_")[2]
        why = next((DIFFERENT[each] for each in DIFFERENT if re.match(each, name)), None)
        outcome: str = report.outcome
        about = ""
        if report.failed:
            about = str(report.longrepr).strip().splitlines()[-1]
            crash = getattr(report.longrepr, "reprcrash", None)
            about = crash.message.splitlines()[0] if crash is not None else about
            outcome, about = ("differs on purpose", why) if why else (outcome, about)
        elif report.skipped:
            about = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            about = about.removeprefix("Skipped: ")
        self.is_right &= outcome != "failed"
        self.counts[outcome] += 1
        print(f"{outcome}: {name}{f': {about}' if about else ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("source", type=Path, help="the unpacked source of llama.cpp")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where the GGUF files are")
    parser.add_argument(
        "-k", default="", metavar="WORDS", help="only tests with these words in their names"
    )
    asked = parser.parse_args()
    tests = asked.source.resolve() / "tools" / "server" / "tests"
    if not tests.is_dir():
        sys.exit(f"{tests} does not exist: give the unpacked source of llama.cpp")
    folder = Folder(asked.models and asked.models.resolve())
    sys.path.insert(0, str(tests))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.chdir(tests)
    sys.modules.setdefault("wget", types.ModuleType("wget"))
    utils: Any = importlib.import_module("utils")
    utils.ServerProcess.start = lambda server, *_how, **_named: start(server, folder)
    utils.ServerPreset.load_all = lambda: None
    utils.download_file = folder.fetch
    matches = utils.match_regex
    utils.match_regex = lambda regex, text: (
        bool(text) if _DRAWN.fullmatch(regex) else matches(regex, text)
    )
    files = [str(each) for each in tests.glob("unit/test_*.py") if each.stem not in LEFT_OUT]
    options = f"-p no:terminal -p no:cacheprovider --rootdir {tests}".split()
    lines = Lines()
    pytest.main([*options, "-k", asked.k, *sorted(files)], plugins=[lines])
    for name, why in LEFT_OUT.items():
        print(f"left out: {name}: {why}")
    print(", ".join(f"{count} {outcome}" for outcome, count in lines.counts.items()))
    n_tests = sum(lines.counts.values())
    if n_tests == 0:
        print("no test has these words in its name")
        return 1
    if lines.counts["skipped"] == n_tests:
        print("no test could run: their models are neither in --models nor on a reachable hub")
        return 1
    return 0 if lines.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
