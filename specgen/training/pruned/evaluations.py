"""Agreements of sets of left-out blocks, kept on the disk so that an interrupted search can continue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from specgen.errors import ModelFileError, OutputError
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    locked,
    take_lines,
    to_line,
    write_errors,
)

#: Blocks of a model, by their numbers.
Blocks: TypeAlias = frozenset[int]
#: The share of positions at which the model without some blocks has the whole model's likeliest token.
Agreement: TypeAlias = Callable[[Blocks], float]


class Evaluations:
    """An `Agreement` that judges each set of blocks once and keeps the results in a file.

    `key` identifies the model and texts of the judgements; lines with another key are ignored.
    """

    def __init__(
        self, agreement: Agreement, file: AppendedFile, key: str, known: dict[Blocks, float]
    ) -> None:
        self._agreement = agreement
        self._file = file
        self._key = key
        #: The results so far.
        self.known = known

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, key: str, agreement: Agreement) -> Iterator[Evaluations]:
        """Open the results in a file, which one process at a time may use. Raise `OutputError`,
        `ModelFileError`."""
        busy = OutputError(f"{path}: another process is at it", "wait until it is done")
        with locked(path.with_name(f"{path.name}.lock"), busy):
            known, n_bytes = _read(path, key)
            with AppendedFile.opened(path) as file:
                file.cut(n_bytes)
                yield Evaluations(agreement, file, key, known)

    def __call__(self, left_out: Blocks) -> float:
        if left_out not in self.known:
            found = self._agreement(left_out)
            self.known[left_out] = found
            line = {"key": self._key, "left_out": sorted(left_out), "agreement": found}
            self._file.append(to_line(line))
        return self.known[left_out]


def _read(path: Path, key: str) -> tuple[dict[Blocks, float], int]:
    known: dict[Blocks, float] = {}

    def take(line: Any) -> None:
        if line["key"] == key:
            known[frozenset(map(int, line["left_out"]))] = float(line["agreement"])

    with write_errors(path):
        data = path.read_bytes() if path.exists() else b""
    try:
        return known, take_lines(data, take)
    except DamagedLineError as error:
        hint = f"delete {path}: it is made again"
        raise ModelFileError(f"{path}: line {error.number} is damaged", hint) from error


__all__ = ["Agreement", "Blocks", "Evaluations"]
