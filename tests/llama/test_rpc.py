"""A target on workers: llama.cpp's RPC, with worker processes on the loopback."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specgen.cli.flags import machine
from specgen.errors import BackendError, MemoryLimitError, UsageError, WorkerLostError
from specgen.llama import LlamaBackend, LlamaModel, rpc
from specgen.llama.kernels.attached import Kernels
from specgen.measure import diagnosis as doctor
from specgen.options import ContextOptions, Workers
from specgen.system import worker_probe
from specgen.system.arrays import Logits
from specgen.system.worker_probe import (
    WorkerInfo,
    check_protocol,
    lost_among,
    own_protocol,
    parse_endpoint,
    probe,
)
from tests.helpers import cli
from tests.helpers.cli import Specgen
from tests.helpers.rows import decoded
from tests.helpers.workers import (
    Worker,
    finished,
    free_port,
    needs_rpc,
    running_worker,
    specgen,
    wait_for,
)
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import Architecture

pytestmark = pytest.mark.slow


@pytest.fixture(name="in_process")
def _in_process(capsys: pytest.CaptureFixture[str]) -> Specgen:
    return cli.in_process(capsys)


QUICK = ("-t", "1", "--no-stats", "--quiet", "-n", "24")


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[Worker, Worker]]:
    with running_worker() as first, running_worker("--memory", "64") as second:
        yield first, second


def endpoints(*found: Worker) -> str:
    return ",".join(worker.endpoint for worker in found)


@needs_rpc
class TestTarget:
    """What is decoded over the wire."""

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        return finished(specgen("run", *QUICK, *arguments))

    @pytest.mark.parametrize("draft", ["none", "ngram", "draft.gguf"])
    def test_the_text_is_that_of_this_machine(
        self, two_workers: tuple[Worker, Worker], tiny_models: Path, draft: str
    ) -> None:
        if draft.endswith(".gguf"):
            draft = str(tiny_models / draft)
        own = ("-m", tiny_models / "target.gguf", "--kernels", "llama.cpp", "a b a b a")
        here = self.run(*own, "-md", "none")
        there = self.run(*own, "-md", draft, "--rpc", endpoints(*two_workers))
        assert here[0] == 0, here
        assert len(here[1]) > 10
        assert there == here

    def test_layers_are_on_the_devices_that_the_split_names(
        self, two_workers: tuple[Worker, Worker], tiny_models: Path
    ) -> None:
        def placed(split: str) -> list[bool]:
            process = specgen(
                *("run", "-m", tiny_models / "target.gguf", "-md", "none", "-n", "2", "--verbose"),
                *("--rpc", endpoints(*two_workers), "--tensor-split", split, "abc"),
            )
            code, _, err = finished(process)
            assert code == 0, err
            lines = [line for line in err.splitlines() if "model buffer size" in line]
            return [any(f"[{w.endpoint}]" in line for line in lines) for w in two_workers]

        assert placed("1,1") == [True, True]
        assert placed("1,0") == [True, False]
        assert placed("0,1") == [False, True]

    def test_the_output_matrix_may_stay_and_a_share_too_many_is_refused(
        self, two_workers: tuple[Worker, Worker], tiny_models: Path
    ) -> None:
        own = ("-m", tiny_models / "target.gguf", "-md", "none", "--kernels", "llama.cpp", "a b")
        remote = (*own, "--rpc", endpoints(*two_workers))
        there, here = self.run(*remote), self.run(*remote, "--output-here")
        assert there[0] == 0, there
        assert here == there
        code, _, err = self.run(*remote, "--tensor-split", "1,2,3")
        assert code == UsageError.exit_code
        assert "3 shares, but the workers have 2 devices" in err


@needs_rpc
class TestKernels:
    """specgen's kernels on workers."""

    @pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35", "mamba2"])
    def test_rows_are_those_of_the_kernels_here(
        self,
        kernels: Kernels,
        two_workers: tuple[Worker, Worker],
        tmp_path: Path,
        architecture: Architecture,
    ) -> None:
        """To the last bit: a batch costs no more there, and texts are those of this machine."""
        config = TinyConfig(architecture=architecture, tensor_type="q8_0")
        path = write_tiny_model(tmp_path / "tiny.gguf", config)
        remote = Workers(tuple(worker.endpoint for worker in two_workers))
        here, there = self.rows(path), self.rows(path, remote)
        # Gated delta nets are computed by operators of llama.cpp's that differ between devices.
        rounding = 1e-4 if architecture == "qwen35" else 0.0
        np.testing.assert_allclose(there, here, rtol=0.0, atol=rounding)
        if architecture == "llama":  # what else a worker computes is llama.cpp's in any case
            kernels.enable(products=False, attention=False)
            assert not np.array_equal(self.rows(path), there)

    def rows(self, path: Path, workers: Workers | None = None) -> Logits:
        """Logits of some tokens: a batch, then two of them alone."""
        with contextlib.closing(LlamaModel(path, workers=workers)) as model:
            options = ContextOptions(n_threads=1)
            backend = LlamaBackend(model, options, n_ctx=256, clock=time.perf_counter, n_outputs=8)
            with contextlib.closing(backend):
                parts = ((10, 16), (16, 17), (17, 18))
                return np.concatenate([decoded(backend, range(*part)) for part in parts])


@needs_rpc
class TestLoss:
    """Workers that die or hang."""

    #: Long enough that no machine gets through before the worker is gone.
    LONG = ("-n", "4000", "-c", "4096", "--ignore-eos", "-md", "none", "-t", "1", "--raw")

    @pytest.mark.parametrize(
        ("number", "why"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "2 s")]
    )
    def test_a_lost_worker_keeps_the_text_so_far_and_has_an_exit_code(
        self,
        two_workers: tuple[Worker, Worker],
        tiny_models: Path,
        number: signal.Signals,
        why: str,
    ) -> None:
        with running_worker() as worker:
            process = specgen(
                *("run", "-m", tiny_models / "target.gguf", *self.LONG, "--json"),
                *("--rpc", endpoints(two_workers[0], worker), "--rpc-timeout", "2", "abc"),
            )
            assert process.stdout is not None
            for line in process.stdout:
                if '"event": "committed"' in line:
                    break
            worker.process.send_signal(number)
            code, out, err = finished(process, 60.0)
        assert code == WorkerLostError.exit_code
        assert "Traceback" not in err
        message = next(line for line in err.splitlines() if line.startswith("error: "))
        assert worker.endpoint in message
        assert why in message
        if number == signal.SIGKILL:  # of one that hangs nobody can tell from here
            assert two_workers[0].endpoint not in message
        end = json.loads(out.splitlines()[-1])
        assert (end["event"], end["finish_reason"]) == ("finished", "interrupted")
        assert end["n_tokens"] > 0

    def test_a_batch_keeps_complete_results_and_writes_no_errors(
        self, tmp_path: Path, tiny_models: Path
    ) -> None:
        """Of four lines, two at once, the last two are long."""
        source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines = [
            {"custom_id": str(n), "prompt": "a" * (n + 1), "max_tokens": 20 if n < 2 else 4000}
            for n in range(4)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with running_worker() as worker:
            model = ("-m", tiny_models / "target.gguf", "-md", "none", "-t", "1", "--ignore-eos")
            own = ("-np", "2", "-c", "4096", "--rpc", worker.endpoint)
            process = specgen("batch", source, results, *model, *own)
            wait_for(lambda: results.exists() and results.read_text().count("\n") == 2)
            worker.process.kill()
            code, _, err = finished(process, 60.0)
        assert code == WorkerLostError.exit_code, err
        written = [json.loads(line) for line in results.read_text().splitlines()]
        assert {line["custom_id"] for line in written} == {"0", "1"}
        assert all(line["error"] is None for line in written)

    def test_ctrl_c_ends_a_worker_with_a_line(self) -> None:
        with running_worker() as worker:
            worker.process.send_signal(signal.SIGINT)
            code, _, err = finished(worker.process, 30.0)
        assert code == 0
        assert err.splitlines()[-1].startswith("note: the worker has ended")


class TestProbe:
    """Asking a worker what it is, without llama.cpp."""

    @needs_rpc
    def test_it_reports_protocol_and_memory(self, two_workers: tuple[Worker, Worker]) -> None:
        found = probe(two_workers[1].endpoint, 10.0)
        assert found.protocol == own_protocol()
        assert [free for free, _ in found.devices] == [64 * 2**20]
        assert 0.0 < found.round_trip_s < 10.0

    @needs_rpc
    def test_doctor_reports_each_worker(
        self, two_workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "places_of", lambda _build: [])
        missing = f"127.0.0.1:{free_port()}"
        report = doctor.diagnose(endpoints=(two_workers[0].endpoint, missing))
        checks = report.checks[-2:]
        assert [check.passed for check in checks] == [True, False]
        assert "B free; a round trip takes" in checks[0].message
        assert checks[1].error == "WorkerLostError"

    def test_another_protocol_version_is_an_error_with_a_hint(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_probe, "own_protocol", lambda: "7.0.0")
        check_protocol(WorkerInfo("a:1", "7.0.0", (), 0.0))
        with pytest.raises(
            BackendError, match=r"a:1 uses RPC protocol 7\.0\.1, this machine 7\.0\.0"
        ):
            check_protocol(WorkerInfo("a:1", "7.0.1", (), 0.0))

    def test_a_silent_server_is_not_taken_for_a_worker(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(WorkerLostError, match=r"did not answer within 0\.2 s"):
                probe(endpoint, 0.2)

    def test_the_worker_that_ended_its_connection_is_lost(self) -> None:
        """Even if it still accepts connections, as a killed process does for a moment. The other
        worker is not probed, because it may accept no connection while it is in use.
        """
        with contextlib.ExitStack() as stack:
            listening = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
                for _ in range(2)
            ]
            addresses = [server.getsockname() for server in listening]
            clients = [stack.enter_context(socket.create_connection(a)) for a in addresses]
            serving = [stack.enter_context(server.accept()[0]) for server in listening]
            endpoints = [f"{host}:{port}" for host, port in addresses]
            stack.enter_context(socket.create_connection(addresses[1]))  # fills its queue
            serving[0].close()
            assert clients[0].recv(1) == b""
            for _ in range(3):
                assert lost_among(endpoints) == endpoints[:1]

    @pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:70000", "::1:5"])
    def test_other_texts_are_rejected_as_endpoints(self, text: str) -> None:
        with pytest.raises(UsageError, match="is not the address of a worker"):
            parse_endpoint(text)


class TestRemoteCalls:
    """Calls that may take long run in a separate process. A hanging one is left behind."""

    def test_what_was_alive_before_a_call_does_not_lengthen_it(self) -> None:
        script = """
import time
from specgen.llama.rpc import RemoteCalls
from specgen.errors import WorkerLostError
calls = RemoteCalls(("127.0.0.1:1",), 2.0)
assert calls(lambda: 7) == 7
calls.alive()
started = time.monotonic()
try:
    calls(time.sleep, 60)
except WorkerLostError as error:
    print(error.message, error.hint)
    print(time.monotonic() - started < 3.5)
"""
        message, is_short = cli.ended(code=script).stdout.splitlines()
        assert message.startswith("lost 127.0.0.1:1: no answer within 2 s")
        assert "--rpc-timeout" in message
        assert is_short == "True"


class TestOptions:
    """--rpc and what goes with it, before anything is loaded."""

    def test_the_options_name_the_workers(self) -> None:
        found = machine(rpc="a:1, b:2", tensor_split="3,1", rpc_timeout=5.0).target.workers
        assert found == Workers(("a:1", "b:2"), (3.0, 1.0), timeout_s=5.0)
        assert machine().target.workers is None

    def test_invalid_worker_options_are_rejected(self) -> None:
        many = ",".join(f"a:{port}" for port in range(1, 18))
        splits = [("a:1", split) for split in ("0", "-1,2", "x", "nan")]
        for asked, split in ((None, "1,2"), ("a:1,a:1", None), (many, None), *splits):
            with pytest.raises(UsageError):
                machine(rpc=asked, tensor_split=split)

    def test_another_address_needs_the_option_for_insecure_networks(self) -> None:
        code, out, err = finished(specgen("worker", "--host", "0.0.0.0"))
        assert (code, out) == (UsageError.exit_code, "")
        assert "--insecure-network" in err

    def test_too_little_memory_on_the_workers_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tiny_models: Path
    ) -> None:
        def offer(endpoint: str, _timeout_s: float) -> WorkerInfo:
            return WorkerInfo(endpoint, "1.0.0", ((1000, 2**40),), 0.0)

        monkeypatch.setattr(rpc, "probe", offer)
        monkeypatch.setattr(rpc, "check_protocol", lambda _worker: None)
        with pytest.raises(MemoryLimitError, match=r"the workers offer only .*B"):
            LlamaModel(tiny_models / "target.gguf", workers=Workers(("a:1", "b:1")))

    def test_all_files_of_a_model_count(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def offer(endpoint: str, _timeout_s: float) -> WorkerInfo:
            return WorkerInfo(endpoint, "1.0.0", ((2500, 2**40),), 0.0)

        monkeypatch.setattr(rpc, "probe", offer)
        monkeypatch.setattr(rpc, "check_protocol", lambda _worker: None)
        parts = [tmp_path / f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
        for part in parts:
            part.write_bytes(bytes(1000))
        with pytest.raises(MemoryLimitError, match="the model has 3.00 kB"):
            rpc.check_workers(Workers(("a:1",)), parts[0])
        parts[2].write_bytes(bytes(500))
        rpc.check_workers(Workers(("a:1",)), parts[0])

    def test_a_build_without_rpc_names_the_cure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rpc, "built_in_backend", lambda: None)
        monkeypatch.setattr(rpc, "library_path", lambda: None)
        with pytest.raises(BackendError, match="no RPC backend") as error:
            rpc.load_rpc()
        assert error.value.hint is not None
        assert "make rpc" in error.value.hint
