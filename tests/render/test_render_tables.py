"""The tables of `specgen bench`."""

from __future__ import annotations

import io

from specgen.render.streams import make_console
from specgen.render.tables import print_bench_tables


def test_columns_are_not_explained_if_nothing_was_measured() -> None:
    """Ctrl-C before the first answer leaves no table, and so nothing to explain."""
    stream = io.StringIO()
    print_bench_tables([], make_console(stream, {}))
    assert stream.getvalue() == ""
