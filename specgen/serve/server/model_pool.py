"""The models of a server by name: loads them when they are asked for, and unloads idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from specgen.errors import BackendError, MemoryLimitError, SpecgenError
from specgen.llama.embeddings import Embedder
from specgen.options import SessionOptions
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.jobs import FairLock, OpenedModel, ServedEmbedder, ServedModel
from specgen.serve.server.metrics import Metrics, ServerMetrics
from specgen.serve.server.options import Limits
from specgen.system.quantities import human_bytes

#: The states of a model, in the words of llama.cpp's server with several models.
ModelStatus: TypeAlias = Literal["unloaded", "loading", "loaded"]
LoadedModel: TypeAlias = ServedModel | ServedEmbedder
#: The tag of Ollama's that a name without a tag stands for.
_LATEST = ":latest"
_log = logging.getLogger("specgen.serve.server")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served."""

    name: str
    #: Loads the model. Its arguments are the turns, to be held while it decodes or opens contexts,
    #: and a function that returns whether to give up, which it does by raising `KeyboardInterrupt`.
    open: Callable[[FairLock, Callable[[], bool]], OpenedModel | Embedder]
    #: An estimate of the memory that it needs.
    n_bytes: int = 0
    #: Whether it makes embeddings. Otherwise it generates text.
    embeds: bool = False
    #: The options with which it is loaded, for descriptions of a model that is not loaded.
    options: SessionOptions | None = None


@dataclass(slots=True, eq=False)
class PooledModel:
    """An entry of the pool, and its model if it is loaded."""

    entry: ModelEntry
    metrics: Metrics
    #: The model, while it is loaded.
    model: LoadedModel | None = None
    #: The error of the last attempt to load it; None if that succeeded.
    failure: SpecgenError | None = None
    is_loading: bool = False
    #: The number of requests that hold it, from `lease` to `release`. Their unfinished answers are
    #: counted by the model itself.
    n_leases: int = 0
    #: The requests that wait for it.
    waiting: list[asyncio.Future[LoadedModel]] = field(default_factory=list)
    #: The task that provides the model for these requests; None if none waits.
    task: asyncio.Task[None] | None = None
    #: The number of the last request for it, which orders models by their last use.
    last_request: int = 0
    #: When the last request or answer ended, on the monotonic clock.
    last_used_s: float = 0.0
    #: How long it stays loaded after that. Infinity means until another model needs the memory.
    keep_s: float = math.inf
    #: The task that unloads it after that time, if there is one.
    unloading: asyncio.Task[None] | None = None

    @property
    def status(self) -> ModelStatus:
        """Whether the model is loaded, or being loaded."""
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

    @property
    def remaining_s(self) -> float:
        """How many more seconds it stays loaded if it is not used again.

        While it generates answers, that is all of `keep_s`: the time begins when they have ended.
        """
        if self.model is not None and self.model.n_open:
            return self.keep_s
        return self.last_used_s + self.keep_s - time.monotonic()


class ModelPool:
    """Maps names to models, and keeps the most recently used ones loaded, as far as memory allows.

    One thread loads and unloads models. A model with unfinished answers stays loaded: a request for
    another one waits if memory has no room for both. From then on all requests wait their turn, so
    that a steady stream of requests for one model does not keep others waiting for ever.
    Coroutines belong to one event loop. Leaving the context closes all models.

    Args:
        entries: The models. If there is only one, any name stands for it.
        limits: At most `n_waiting` requests (or one, if that is 0) wait for at most `request_s`
            seconds.
        memory_bytes: The maximum of the loaded models' estimated sizes, all together.
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
        self._turns = FairLock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="specgen-loading")
        self._is_ending = threading.Event()
        #: Held by the task that provides a model.
        self._providing = asyncio.Lock()
        #: Set when a model may have become idle, or a request no longer waits.
        self._changed = asyncio.Event()
        #: The event loop of the coroutines; None until a request has waited.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Whether a model cannot be loaded until another one is idle.
        self._lacks_room = False
        #: The number of requests so far.
        self._n_requests = 0

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._loader.shutdown(wait=True)
        with contextlib.ExitStack() as stack:
            for model in self.loaded:
                stack.callback(model.close)

    # --- the state of the models --------------------------------------------------------------

    @property
    def loaded(self) -> list[LoadedModel]:
        """The models that are loaded."""
        return [pooled.model for pooled in self.models.values() if pooled.model is not None]

    def find(self, name: object) -> PooledModel:
        """Return the model that a request names in its field ``model``.

        Raises:
            RequestError: If there is no model of that name, or no name but several models.
        """
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        pooled = self._named(name) if isinstance(name, str) else None
        if pooled is not None:
            return pooled
        names = ", ".join(self.models)
        if name is None:
            message = f"no model is named; the models are {names}"
            raise RequestError(400, message, "invalid_value", "model")
        message = f"there is no model {name!r}; the models are {names}"
        raise RequestError(404, message, "model_not_found", "model")

    def _named(self, name: str) -> PooledModel | None:
        """Return the model of a name; None if there is none.

        Ollama's clients may add the tag ``latest`` to a name, or leave it out.
        """
        for spelling in (name, name.removesuffix(_LATEST), name + _LATEST):
            if spelling in self.models:
                return self.models[spelling]
        return None

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread of an engine, if one did."""
        for model in self.loaded:
            if model.failure is not None:
                return model.failure
        return None

    @property
    def n_open(self) -> int:
        """The number of unfinished answers, plus the number of requests that wait for a model."""
        return sum(model.n_open for model in self.loaded) + self._n_waiting

    @property
    def _n_waiting(self) -> int:
        return sum(len(pooled.waiting) for pooled in self.models.values())

    def cancel_all(self) -> None:
        """End all answers, and refuse the requests that wait. Called in the event loop."""
        self._is_ending.set()
        for pooled in self.models.values():
            self._refuse(pooled, RequestError.shutting_down())
        for model in self.loaded:
            model.cancel_all()

    # --- leases -------------------------------------------------------------------------------

    def load(self, name: str) -> LoadedModel:
        """Load a model before the server runs, with the exceptions of `ModelEntry.open`."""
        return self._load(self.models[name])

    async def lease(self, pooled: PooledModel) -> LoadedModel:
        """Return a model once it is loaded; it then stays loaded until `release`.

        Raises:
            RequestError: If it cannot be loaded, or not in time; if too many requests are waiting;
                or if the server shuts down.
        """
        if self._is_ending.is_set():
            raise RequestError.shutting_down()
        self._n_requests += 1
        pooled.last_request = self._n_requests
        if pooled.model is not None and not self._lacks_room:
            pooled.n_leases += 1
            return pooled.model
        # At least one request may always wait, or no model could ever be loaded.
        if self._n_waiting >= max(1, self._limits.n_waiting):
            raise RequestError.queue_full()
        return await self._wait_for(pooled)

    async def _wait_for(self, pooled: PooledModel) -> LoadedModel:
        """Wait until the model's task has leased it to this request, and return it.

        Raises:
            RequestError: If the task fails, or the time is over.
        """
        self._loop = asyncio.get_running_loop()
        request: asyncio.Future[LoadedModel] = self._loop.create_future()
        pooled.waiting.append(request)
        if pooled.task is None:
            pooled.task = asyncio.ensure_future(self._provide(pooled))
        try:
            await asyncio.wait((request,), timeout=self._limits.request_s or None)
            if not request.done():
                raise self._timeout_error(pooled)
            return request.result()
        except asyncio.CancelledError:  # the client has disconnected, perhaps with a lease
            if request.done() and not request.cancelled() and request.exception() is None:
                self.release(pooled)
            raise
        finally:
            request.cancel()
            if request in pooled.waiting:
                pooled.waiting.remove(request)
            self._changed.set()

    def _timeout_error(self, pooled: PooledModel) -> RequestError:
        message = f"{pooled.entry.name} could not be loaded within {self._limits.request_s:g} s"
        if self._lacks_room:
            message += ": the memory is full, and all loaded models are busy"
        return RequestError(503, message, "model_not_loaded")

    def release(self, pooled: PooledModel) -> None:
        """End a lease. The model stays loaded while its answers are generated."""
        pooled.last_used_s = time.monotonic()
        self._end_lease(pooled)

    def _end_lease(self, pooled: PooledModel) -> None:
        pooled.n_leases -= 1
        self._changed.set()

    @contextlib.contextmanager
    def holding_loaded(self) -> Iterator[list[PooledModel]]:
        """Yield the loaded models, which stay loaded in the block. That does not count as a use."""
        held = [pooled for pooled in self.models.values() if pooled.model is not None]
        for pooled in held:
            pooled.n_leases += 1
        try:
            yield held
        finally:
            for pooled in held:
                self._end_lease(pooled)

    def keep(self, pooled: PooledModel, keep_s: float) -> None:
        """Set how long a loaded model stays loaded after its last use, until it is unloaded.

        Args:
            pooled: The model.
            keep_s: The time in seconds; infinity for no limit. Another model may still need its
                memory before.
        """
        pooled.keep_s = keep_s
        pooled.last_used_s = time.monotonic()
        self._changed.set()
        if math.isfinite(keep_s) and pooled.unloading is None:
            pooled.unloading = asyncio.ensure_future(self._unload_in_time(pooled))

    async def unload(self, pooled: PooledModel) -> None:
        """Unload a model if it is idle, or else as soon as it is."""
        if pooled.model is None:
            return
        self.keep(pooled, 0.0)
        if pooled.is_idle:
            await self._unload_if_due(pooled)

    async def _unload_in_time(self, pooled: PooledModel) -> None:
        """Unload a model when its time is over, unless it gets unlimited time before that."""
        self._loop = asyncio.get_running_loop()
        try:
            while pooled.model is not None and math.isfinite(pooled.keep_s):
                if not pooled.is_idle:
                    await self._next_change()
                elif pooled.remaining_s > 0.0:
                    timer = self._loop.call_later(pooled.remaining_s, self._changed.set)
                    await self._next_change()
                    timer.cancel()
                else:
                    await self._unload_if_due(pooled)
        finally:
            pooled.unloading = None

    async def _next_change(self) -> None:
        """Wait until a model may have become idle, or a request no longer waits."""
        self._changed.clear()
        await self._changed.wait()

    async def _unload_if_due(self, pooled: PooledModel) -> None:
        """Unload a model if its time is still over once no other model is being loaded."""
        async with self._providing:
            if pooled.is_idle and pooled.remaining_s <= 0.0:
                await self._unload(pooled)
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
        """Load a model and lease it to the waiting requests, or give them the error."""
        name = pooled.entry.name
        try:
            async with self._providing:
                if pooled.model is None and await self._make_room(pooled):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._loader, self._load, pooled)
                self._lease_to_waiting(pooled)
        except SpecgenError as error:
            status = 503 if isinstance(error, MemoryLimitError) else 500
            message = f"{name} cannot be loaded: {error.message}"
            _log.error("%s", message)
            refusal = RequestError(status, message, code="model_not_loaded")
            if self._is_ending.is_set():
                refusal = RequestError.shutting_down()
            self._refuse(pooled, refusal)
        except Exception:  # noqa: BLE001 - a bug: the requests fail, the server goes on
            _log.exception("%s cannot be loaded", name)
            message = "internal error; see the server's log"
            self._refuse(pooled, RequestError(500, message, code="bug"))

    def _lease_to_waiting(self, pooled: PooledModel) -> None:
        """Lease a model to the requests that wait for it.

        If it is not loaded, that is because none of them waits any more.
        """
        pooled.task = None
        waiting = pooled.waiting
        pooled.waiting = []
        for request in waiting:
            if not request.done() and pooled.model is not None:
                pooled.n_leases += 1
                request.set_result(pooled.model)

    async def _make_room(self, pooled: PooledModel) -> bool:
        """Make room for a model by unloading the least recently used ones, waiting if necessary.

        Returns:
            Whether there is room. If not, no request waits for the model any more.
        """
        try:
            while pooled.is_wanted:
                loaded = [other for other in self.models.values() if other.model is not None]
                idle = [other for other in loaded if other.is_idle]
                needed_bytes = _total_bytes([*loaded, pooled])
                if needed_bytes <= self._memory_bytes:
                    return True
                if needed_bytes - _total_bytes(idle) <= self._memory_bytes:
                    await self._unload(min(idle, key=lambda other: other.last_request))
                else:  # even without the idle models there is no room
                    self._lacks_room = True
                    await self._next_change()
            return False
        finally:
            self._lacks_room = False

    async def _unload(self, pooled: PooledModel) -> None:
        """Close a model in the loader's thread, if it is loaded."""
        model = pooled.model
        if model is None:
            return
        pooled.model = None
        pooled.keep_s = math.inf
        try:
            await asyncio.get_running_loop().run_in_executor(self._loader, model.close)
        except Exception:  # noqa: BLE001 - `close` frees all that it can, so there is room now
            _log.exception("%s was not closed as it should be", pooled.entry.name)
        pooled.metrics.show_slots(0)
        self._note(f"unloaded {pooled.entry.name}")

    def _load(self, pooled: PooledModel) -> LoadedModel:
        """Load a model. Called in the loader's thread, or before the server runs."""
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
                idle=functools.partial(self._note_idle, pooled),
                note=self._note,
            )
        pooled.model = model
        pooled.metrics.show_slots(model.n_parallel)
        if len(self.models) > 1:
            seconds = time.perf_counter() - started_s
            loaded = [other for other in self.models.values() if other.model is not None]
            allowed = human_bytes(int(self._memory_bytes))
            in_use = f"{human_bytes(_total_bytes(loaded))} of {allowed} in use"
            self._note(f"loaded {name} in {seconds:.1f} s; {in_use}")
        return model

    def _open(self, pooled: PooledModel) -> OpenedModel | Embedder:
        """Call `ModelEntry.open`, and keep its error for the state of the model."""
        pooled.is_loading = True
        pooled.failure = None
        try:
            return pooled.entry.open(self._turns, self._is_ending.is_set)
        except SpecgenError as error:
            pooled.failure = error
            raise
        except KeyboardInterrupt:
            if self._is_ending.is_set():
                raise BackendError("the server is shutting down") from None
            raise
        finally:
            pooled.is_loading = False

    def _note_idle(self, pooled: PooledModel) -> None:
        """Tell the waiting tasks, from any thread, that a model has become idle."""
        pooled.last_used_s = time.monotonic()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)


def _total_bytes(models: Iterable[PooledModel]) -> int:
    return sum(pooled.entry.n_bytes for pooled in models)
