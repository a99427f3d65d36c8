"""A disk that becomes full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def full_disk(n_bytes: int = 0) -> Iterator[None]:
    """Let no file grow beyond `n_bytes`, as on a full disk."""
    resource = pytest.importorskip("resource", reason="needs POSIX limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
