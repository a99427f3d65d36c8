"""The models of a server by name: loads them when they are asked for, and unloads idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from specgen.errors import BackendError, MemoryLimitError, SpecgenError
from specgen.llama.embeddings import Embedder
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.jobs import OpenedModel, ServedEmbedder, ServedModel, Turns
from specgen.serve.server.metrics import Metrics, ServerMetrics
from specgen.serve.server.options import Limits
from specgen.system.quantities import human_bytes

#: In the words of llama.cpp's server with several models.
ModelStatus: TypeAlias = Literal["unloaded", "loading", "loaded"]
LoadedModel: TypeAlias = ServedModel | ServedEmbedder
_log = logging.getLogger("specgen.serve.server")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served."""

    name: str
    #: Loads it. It gets the turns, to be held while it decodes or opens contexts, and a function
    #: that tells whether to give up, which it does by raising `KeyboardInterrupt`.
    open: Callable[[Turns, Callable[[], bool]], OpenedModel | Embedder]
    #: An estimate of its memory.
    n_bytes: int = 0
    #: Whether it makes embeddings, or generates text.
    embeds: bool = False


@dataclass(slots=True, eq=False)
class PooledModel:
    """An entry of the pool, and its model if it is loaded."""

    entry: ModelEntry
    metrics: Metrics
    #: The model, while it is loaded.
    model: LoadedModel | None = None
    #: Why it could not be loaded, the last time.
    failure: SpecgenError | None = None
    is_loading: bool = False
    #: The number of requests that use it, not counting those whose answers are generated.
    n_leases: int = 0
    #: The requests that wait for it.
    waiting: list[asyncio.Future[LoadedModel]] = field(default_factory=list)
    #: Provides it for those that wait.
    task: asyncio.Task[None] | None = None
    #: When it was last asked for: the number of that request.
    used: int = 0

    @property
    def status(self) -> ModelStatus:
        """Whether the model is loaded."""
        if self.is_loading:
            return "loading"
        return "unloaded" if self.model is None else "loaded"

    @property
    def is_idle(self) -> bool:
        """Whether the model is loaded and nobody uses it."""
        return self.model is not None and not self.n_leases and not self.model.n_open

    @property
    def is_wanted(self) -> bool:
        """Whether a request still waits for it."""
        return any(not request.done() for request in self.waiting)


class ModelPool:
    """Maps names to models, and keeps those loaded that were used last, as far as memory allows.

    One thread loads and unloads models. A model with unfinished answers stays loaded: a request for
    another one waits if memory has no room for both. From then on all requests wait their turn, so
    that a steady stream of requests for one model does not keep others waiting for ever.
    Coroutines belong to one event loop. Leaving the context closes all models.

    Args:
        entries: The models. Any name stands for a single one.
        limits: At most `n_waiting` requests wait, or one if that is 0, for `request_s` seconds.
        memory_bytes: The memory for the estimated sizes of loaded models.
        note: Gets sentences for the user.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        limits: Limits,
        memory_bytes: float = math.inf,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.metrics = ServerMetrics()
        self.models = {
            entry.name: PooledModel(entry, Metrics(self.metrics, entry.name)) for entry in entries
        }
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._note = note
        self._turns = Turns()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="specgen-loading")
        self._is_ending = threading.Event()
        #: Held by the task that provides a model.
        self._providing = asyncio.Lock()
        #: Set when a model may have become idle, or a request has gone.
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Whether a model waits until another one is idle.
        self._lacks_room = False
        self._n_requests = 0

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._loader.shutdown(wait=True)
        with contextlib.ExitStack() as stack:
            for model in self.loaded:
                stack.callback(model.close)

    # --- what is there ------------------------------------------------------------------------

    @property
    def loaded(self) -> list[LoadedModel]:
        """The models that are loaded."""
        return [pooled.model for pooled in self.models.values() if pooled.model is not None]

    def find(self, name: object) -> PooledModel:
        """Return the model that a request's `model` stands for. Raise `RequestError`."""
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        if isinstance(name, str) and name in self.models:
            return self.models[name]
        names = ", ".join(self.models)
        if name is None:
            raise RequestError(400, f"name a model: {names}", "invalid_value", "model")
        message = f"there is no model {name!r}; there are {names}"
        raise RequestError(404, message, "model_not_found", "model")

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread of an engine, if one did."""
        for model in self.loaded:
            if model.failure is not None:
                return model.failure
        return None

    @property
    def n_open(self) -> int:
        """The number of answers that are generated, and of requests that wait."""
        return sum(model.n_open for model in self.loaded) + self._n_waiting

    @property
    def _n_waiting(self) -> int:
        return sum(len(pooled.waiting) for pooled in self.models.values())

    def cancel_all(self) -> None:
        """End all answers, and refuse the requests that wait. Called in the event loop."""
        self._is_ending.set()
        for pooled in self.models.values():
            self._refuse(pooled, RequestError.ending())
        for model in self.loaded:
            model.cancel_all()

    # --- leases -------------------------------------------------------------------------------

    def load(self, name: str) -> LoadedModel:
        """Load a model before the server runs. Raise what `ModelEntry.open` raises."""
        return self._load(self.models[name])

    async def lease(self, pooled: PooledModel) -> LoadedModel:
        """Return a model when its turn has come; it stays loaded until `release`.

        Raises:
            RequestError: It cannot be loaded, or not in time; too many requests are waiting; or the
                server ends.
        """
        if self._is_ending.is_set():
            raise RequestError.ending()
        self._n_requests += 1
        pooled.used = self._n_requests
        if pooled.model is not None and not self._lacks_room:
            pooled.n_leases += 1
            return pooled.model
        # If none could wait, no model would ever be loaded.
        if self._n_waiting >= max(1, self._limits.n_waiting):
            raise RequestError.queue_full()
        return await self._wait_for(pooled)

    async def _wait_for(self, pooled: PooledModel) -> LoadedModel:
        """Return a leased model when its task provides it. Raise `RequestError`."""
        self._loop = asyncio.get_running_loop()
        request: asyncio.Future[LoadedModel] = self._loop.create_future()
        pooled.waiting.append(request)
        if pooled.task is None:
            pooled.task = asyncio.ensure_future(self._provide(pooled))
        try:
            await asyncio.wait((request,), timeout=self._limits.request_s or None)
            if not request.done():
                raise self._too_late(pooled)
            return request.result()
        except asyncio.CancelledError:  # the client has gone
            if request.done() and not request.cancelled() and request.exception() is None:
                self.release(pooled)
            raise
        finally:
            request.cancel()
            if request in pooled.waiting:
                pooled.waiting.remove(request)
            self._changed.set()

    def _too_late(self, pooled: PooledModel) -> RequestError:
        message = f"{pooled.entry.name} could not be loaded in {self._limits.request_s:g} s"
        if self._lacks_room:
            message += ": the memory is full of models that generate answers"
        return RequestError(503, message, "model_not_loaded")

    def release(self, pooled: PooledModel) -> None:
        """End a lease. The model stays loaded while its answers are generated."""
        pooled.n_leases -= 1
        self._changed.set()

    def _refuse(self, pooled: PooledModel, error: RequestError) -> None:
        """Give an error to all requests that wait for a model."""
        pooled.task = None
        for request in pooled.waiting:
            if not request.done():
                request.set_exception(error)
        pooled.waiting.clear()
        self._changed.set()

    # --- loading ------------------------------------------------------------------------------

    async def _provide(self, pooled: PooledModel) -> None:
        """Give a model to the requests that wait for it, or the error if it cannot be loaded."""
        name = pooled.entry.name
        try:
            async with self._providing:
                if pooled.model is None and await self._make_room(pooled):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._loader, self._load, pooled)
                self._give(pooled)
        except SpecgenError as error:
            status = 503 if isinstance(error, MemoryLimitError) else 500
            message = f"{name} cannot be loaded: {error.message}"
            _log.error("%s", message)
            refusal = RequestError(status, message, code="model_not_loaded")
            if self._is_ending.is_set():
                refusal = RequestError.ending()
            self._refuse(pooled, refusal)
        except Exception:  # noqa: BLE001 - a bug: the requests fail, the server goes on
            _log.exception("%s cannot be loaded", name)
            message = "the server failed; its log says how"
            self._refuse(pooled, RequestError(500, message, code="bug"))

    def _give(self, pooled: PooledModel) -> None:
        """Lease a model to the requests that wait for it; without it, nobody waits any more."""
        pooled.task = None
        waiting = pooled.waiting
        pooled.waiting = []
        for request in waiting:
            if not request.done() and pooled.model is not None:
                pooled.n_leases += 1
                request.set_result(pooled.model)

    async def _make_room(self, pooled: PooledModel) -> bool:
        """Unload the models that were not used for longest, until another one has room.

        Returns:
            Whether a request still waits for it.
        """
        try:
            while pooled.is_wanted:
                loaded = [each for each in self.models.values() if each.model is not None]
                idle = [each for each in loaded if each.is_idle]
                needed_bytes = _total_bytes([*loaded, pooled])
                if needed_bytes <= self._memory_bytes:
                    return True
                self._changed.clear()
                if needed_bytes - _total_bytes(idle) <= self._memory_bytes:
                    await self._unload(min(idle, key=lambda each: each.used))
                else:
                    self._lacks_room = True
                    await self._changed.wait()
            return False
        finally:
            self._lacks_room = False

    async def _unload(self, pooled: PooledModel) -> None:
        model = pooled.model
        if model is None:
            return
        pooled.model = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._loader, model.close)
        except Exception:  # noqa: BLE001 - it closes all that it can, so that there is room
            _log.exception("%s was not closed as it should be", pooled.entry.name)
        pooled.metrics.show_slots(0)
        self._note(f"unloaded {pooled.entry.name}")

    def _load(self, pooled: PooledModel) -> LoadedModel:
        """Load a model, in the loader's thread, or before the server runs."""
        name = pooled.entry.name
        started_s = time.perf_counter()
        opened = self._open(pooled)
        model: LoadedModel
        n_waiting = self._limits.n_waiting
        if isinstance(opened, Embedder):
            model = ServedEmbedder(name, opened, pooled.metrics, n_waiting, self._turns)
        else:
            model = ServedModel(
                name,
                opened,
                pooled.metrics,
                n_waiting,
                self._turns,
                idle=self._wake,
                note=self._note,
            )
        pooled.model = model
        pooled.metrics.show_slots(model.n_parallel)
        if len(self.models) > 1:
            seconds = time.perf_counter() - started_s
            used = _total_bytes(each for each in self.models.values() if each.model is not None)
            in_use = f"{human_bytes(used)} of {human_bytes(int(self._memory_bytes))} in use"
            self._note(f"loaded {name} in {seconds:.1f} s; {in_use}")
        return model

    def _open(self, pooled: PooledModel) -> OpenedModel | Embedder:
        pooled.is_loading = True
        pooled.failure = None
        try:
            return pooled.entry.open(self._turns, self._is_ending.is_set)
        except SpecgenError as error:
            pooled.failure = error
            raise
        except KeyboardInterrupt:
            if self._is_ending.is_set():
                raise BackendError("the server ends") from None
            raise
        finally:
            pooled.is_loading = False

    def _wake(self) -> None:
        """Tell those who wait, from any thread, that a model has become idle."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)


def _total_bytes(models: Iterable[PooledModel]) -> int:
    return sum(pooled.entry.n_bytes for pooled in models)
