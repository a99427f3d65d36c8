"""A served embedding model: a thread decodes the texts of all requests, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from specgen.llama.embeddings import Embedder
from specgen.serve.server.errors import RequestError
from specgen.serve.server.metrics import Metrics
from specgen.system.arrays import Hidden

_T = TypeVar("_T")


class ServedEmbedder:
    """An embedding model that answers requests. At most `n_waiting` requests wait while one is answered; `turns` is
    held for each text."""

    #: Requests that are answered at once, and what ended the thread: an error ends its request only.
    n_parallel = 1
    failure: BaseException | None = None

    def __init__(
        self,
        name: str,
        embedder: Embedder,
        metrics: Metrics,
        n_waiting: int,
        turns: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self.embedder = embedder
        self.target = embedder.model
        #: Requests that are being answered.
        self.n_open = 0
        self._metrics = metrics
        self._n_waiting = n_waiting
        self._turns = turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specgen-embeddings")
        self._is_ending = False

    async def embed(
        self, texts: Sequence[Sequence[int]], encoded: Callable[[Hidden], _T]
    ) -> list[_T]:
        """Return the `encoded` vectors of texts. Requests take turns, a text each. Raise `RequestError`."""
        if self.n_open > self._n_waiting:
            raise RequestError.queue_full(1)
        loop = asyncio.get_running_loop()
        self.n_open += 1
        self._show_load()
        try:
            found: list[_T] = []
            for tokens in texts:
                if self._is_ending:
                    raise RequestError.ending()
                found.append(await loop.run_in_executor(self._thread, self._embed, tokens, encoded))
            return found
        finally:
            self.n_open -= 1
            self._show_load()

    def _embed(self, tokens: Sequence[int], encoded: Callable[[Hidden], _T]) -> _T:
        with self._turns:
            started = time.perf_counter()
            vector = self.embedder.embed(tokens)
            self._metrics.count_text(len(tokens), time.perf_counter() - started)
        return encoded(vector)

    def _show_load(self) -> None:
        self._metrics.show_load(min(self.n_open, 1), max(0, self.n_open - 1))

    def cancel_all(self) -> None:
        """Refuse the rest of all requests."""
        self._is_ending = True

    def close(self) -> None:
        """End the thread after its current text, and free the model. May be called twice."""
        self._thread.shutdown(wait=True)
        self.embedder.close()
