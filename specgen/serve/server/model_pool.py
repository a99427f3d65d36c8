"""The models of a server by their names: loads them when they are asked for, and unloads idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from specgen.errors import BackendError, MemoryLimitError, SpecgenError
from specgen.llama.embeddings import Embedder
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.server.jobs import OpenedModel, ServedEmbedder, ServedModel, Turns
from specgen.serve.server.metrics import Metrics, ServerMetrics
from specgen.serve.server.options import Limits
from specgen.session.prompts import template_of
from specgen.session.prompts.infill import InfillTokens
from specgen.session.prompts.thoughts import writes_thoughts
from specgen.system.quantities import human_bytes

#: In the words of llama.cpp's server with several models.
ModelStatus: TypeAlias = Literal["unloaded", "loading", "loaded"]
_log = logging.getLogger("specgen.serve.server")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served, with an estimate of its memory; it `embeds`, or generates text.
    `open` loads it, holds the turns that it gets while it decodes or opens contexts, and raises
    `KeyboardInterrupt` if the function that it gets returns True meanwhile.
    """

    name: str
    open: Callable[[Turns, Callable[[], bool]], OpenedModel | Embedder]
    n_bytes: int = 0
    embeds: bool = False


#: A loaded model.
Served: TypeAlias = ServedModel | ServedEmbedder


@dataclass(slots=True, eq=False)
class Place:
    """An entry of the pool, and its model if it is loaded."""

    entry: ModelEntry
    metrics: Metrics
    served: Served | None = None
    failure: SpecgenError | None = None
    is_loading: bool = False
    n_leases: int = 0  # requests that use it, beside those whose answers are generated
    waiting: list[asyncio.Future[Served]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # provides it for those that wait
    used: int = 0  # larger, the later it was asked for

    @property
    def status(self) -> ModelStatus:
        if self.is_loading:
            return "loading"
        return "unloaded" if self.served is None else "loaded"

    @property
    def is_idle(self) -> bool:
        """Whether the model is loaded and nobody uses it."""
        return self.served is not None and not self.n_leases and not self.served.n_open

    @property
    def is_wanted(self) -> bool:
        return any(not each.done() for each in self.waiting)

    def about(self, created: int) -> dict[str, Any]:
        """Return what a list of models says of it. `status` has the form of llama.cpp's server with
        several models.
        """
        model = self.served
        about: dict[str, Any] = {
            "id": self.entry.name,
            "object": "model",
            "created": created,
            "owned_by": "specgen",
            "type": "embeddings" if self.entry.embeds else "llm",
            "status": {"value": self.status, "failed": self.failure is not None},
        }
        if model is not None:
            engine = model.engine if isinstance(model, ServedModel) else model.embedder
            about["capabilities"] = abilities(model)
            about["max_model_len"] = engine.n_ctx
            about["meta"] = {
                "n_vocab": model.target.vocabulary.n_tokens,
                "n_ctx": engine.n_ctx,
                "n_ctx_train": model.target.n_ctx_train,
            }
        return about


def abilities(model: Served) -> list[str]:
    """Return what a model can do, in ollama's words, and ``chat`` if it has a template."""
    if not isinstance(model, ServedModel):
        return ["embedding"]
    target, template = model.target, template_of(model.target, has_tools=True) or ""
    found = {
        "completion": True,
        "chat": bool(template),
        "tools": form_of(template, target.vocabulary.has_control) is not None,
        "thinking": writes_thoughts(template),
        "insert": InfillTokens.of(target.vocabulary) is not None,
    }
    return [name for name, is_able in found.items() if is_able]


class ModelPool:
    """Maps names to models, and keeps those loaded that were used last, as far as their estimated
    sizes fit into `memory_bytes`. With a single entry, any name stands for it. Its exit closes all
    models.

    One thread loads and unloads models. One with unfinished answers stays loaded: a request for
    another that has no room beside it waits. From then on all requests wait their turn, so that a
    steady stream of requests for one model does not keep others waiting for ever. At most
    `limits.n_waiting` requests wait, or one if that is 0, each at most `limits.request_s` seconds.
    Coroutines belong to one event loop.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        limits: Limits,
        memory_bytes: float = math.inf,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.metrics = ServerMetrics()
        self.places = {
            entry.name: Place(entry, Metrics(self.metrics, entry.name)) for entry in entries
        }
        self._limits, self._memory_bytes, self._note = limits, memory_bytes, note
        self._turns = Turns()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="specgen-loading")
        self._is_ending = threading.Event()
        self._providing = asyncio.Lock()  # held by the task that provides a model
        self._changed = asyncio.Event()  # a model may have become idle, or a request has gone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lacks_room = False
        self._n_used = 0

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._loader.shutdown(wait=True)
        with contextlib.ExitStack() as stack:
            for place in self.places.values():
                if place.served is not None:
                    stack.callback(place.served.close)

    # --- what is there ------------------------------------------------------------------------

    @property
    def loaded(self) -> list[Served]:
        return [place.served for place in self.places.values() if place.served is not None]

    def find(self, name: object) -> Place:
        """Return the model that a request's `model` stands for. Raise `RequestError`."""
        if len(self.places) == 1:
            return next(iter(self.places.values()))
        if isinstance(name, str) and name in self.places:
            return self.places[name]
        names = ", ".join(self.places)
        if name is None:
            raise RequestError(400, f"name a model: {names}", "invalid_value", "model")
        message = f"there is no model {name!r}; there are {names}"
        raise RequestError(404, message, "model_not_found", "model")

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread of an engine, if one did."""
        return next((model.failure for model in self.loaded if model.failure), None)

    @property
    def n_open(self) -> int:
        """The number of answers that are generated, and of requests that wait."""
        n_waiting = sum(len(place.waiting) for place in self.places.values())
        return sum(model.n_open for model in self.loaded) + n_waiting

    def cancel_all(self) -> None:
        """End all answers, and refuse the requests that wait for a model. Called in the event loop."""
        self._is_ending.set()
        for place in self.places.values():
            self._refuse(place, RequestError.ending())
        for model in self.loaded:
            model.cancel_all()

    # --- leases -------------------------------------------------------------------------------

    def load(self, name: str) -> Served:
        """Load a model before the server runs. Raise what `ModelEntry.open` raises."""
        return self._load(self.places[name])

    async def lease(self, place: Place) -> Served:
        """Return a model, when it has its turn; it stays loaded until `release`. Raise
        `RequestError`.
        """
        if self._is_ending.is_set():
            raise RequestError.ending()
        self._n_used += 1
        place.used = self._n_used
        if place.served is not None and not self._lacks_room:
            place.n_leases += 1
            return place.served
        # Without one that waits, no model would ever be loaded.
        n_most = max(1, self._limits.n_waiting)
        if sum(len(each.waiting) for each in self.places.values()) >= n_most:
            raise RequestError.queue_full()
        self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[Served] = self._loop.create_future()
        place.waiting.append(answer)
        if place.task is None:
            place.task = asyncio.ensure_future(self._provide(place))
        try:
            await asyncio.wait((answer,), timeout=self._limits.request_s or None)
            if not answer.done():
                message = f"{place.entry.name} could not be loaded in {self._limits.request_s:g} s"
                if self._lacks_room:
                    message += ": the memory is full of models that generate answers"
                raise RequestError(503, message, "model_not_loaded")
            return answer.result()
        except asyncio.CancelledError:  # the client has gone
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.release(place)
            raise
        finally:
            answer.cancel()
            if answer in place.waiting:
                place.waiting.remove(answer)
            self._changed.set()

    def release(self, place: Place) -> None:
        """End a lease. The model stays loaded while its answers are generated."""
        place.n_leases -= 1
        self._changed.set()

    def _refuse(self, place: Place, error: RequestError) -> None:
        place.task = None
        for answer in place.waiting:
            if not answer.done():
                answer.set_exception(error)
        place.waiting.clear()
        self._changed.set()

    # --- loading ------------------------------------------------------------------------------

    async def _provide(self, place: Place) -> None:
        """Give a model to the requests that wait for it, or the error if it cannot be loaded."""
        try:
            async with self._providing:
                if place.served is None and await self._make_room(place):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._loader, self._load, place)
                place.task = None
                waiting, place.waiting = place.waiting, []
                for answer in waiting:
                    if not answer.done() and place.served is not None:
                        place.n_leases += 1
                        answer.set_result(place.served)
        except SpecgenError as error:
            status = 503 if isinstance(error, MemoryLimitError) else 500
            message = f"{place.entry.name} cannot be loaded: {error.message}"
            _log.error("%s", message)
            refusal = RequestError(status, message, code="model_not_loaded")
            self._refuse(place, RequestError.ending() if self._is_ending.is_set() else refusal)
        except Exception:  # noqa: BLE001 - a bug: the requests fail, the server goes on
            _log.exception("%s cannot be loaded", place.entry.name)
            message = "the server failed; its log says how"
            self._refuse(place, RequestError(500, message, code="bug"))

    async def _make_room(self, place: Place) -> bool:
        """Unload models that were not used for longest until there is room for another one; return
        whether a request still waits for it.
        """
        try:
            while place.is_wanted:
                others = [each for each in self.places.values() if each.served is not None]
                idle = [each for each in others if each.is_idle]
                n_lacking = sum(each.entry.n_bytes for each in (*others, place))
                if n_lacking <= self._memory_bytes:
                    return True
                self._changed.clear()
                if n_lacking - sum(each.entry.n_bytes for each in idle) <= self._memory_bytes:
                    await self._unload(min(idle, key=lambda each: each.used))
                else:
                    self._lacks_room = True
                    await self._changed.wait()
            return False
        finally:
            self._lacks_room = False

    async def _unload(self, place: Place) -> None:
        model, place.served = place.served, None
        if model is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._loader, model.close)
        except Exception:  # noqa: BLE001 - it closes all that it can, so that there is room
            _log.exception("%s was not closed as it should be", place.entry.name)
        place.metrics.show_slots(0)
        self._note(f"unloaded {place.entry.name}")

    def _load(self, place: Place) -> Served:
        name = place.entry.name
        place.is_loading, place.failure = True, None
        started = time.perf_counter()
        try:
            opened = place.entry.open(self._turns, self._is_ending.is_set)
        except SpecgenError as error:
            place.failure = error
            raise
        except KeyboardInterrupt:
            if self._is_ending.is_set():
                raise BackendError("the server ends") from None
            raise
        finally:
            place.is_loading = False
        shared = place.metrics, self._limits.n_waiting, self._turns
        if isinstance(opened, Embedder):
            place.served = ServedEmbedder(name, opened, *shared)
        else:
            place.served = ServedModel(name, opened, *shared, self._wake, self._note)
        place.metrics.show_slots(place.served.n_parallel)
        if len(self.places) > 1:
            seconds = time.perf_counter() - started
            sizes = [each.entry.n_bytes for each in self.places.values() if each.served]
            in_use = f"{human_bytes(sum(sizes))} of {human_bytes(int(self._memory_bytes))} in use"
            self._note(f"loaded {name} in {seconds:.1f} s; {in_use}")
        return place.served

    def _wake(self) -> None:
        """Tell those who wait, from any thread, that a model has become idle."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)
