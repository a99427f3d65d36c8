r"""Run llama.cpp's server benchmark, `speed_bench.py`, on `specgen serve` with any prompts.

    python -m benchmarks.speed_bench llama.cpp/tools/server/bench/speed-bench/speed_bench.py \
        --prompts question.jsonl -m 1.5b.gguf -md smollm2.gguf -- --limit 2 --osl 128

`speed_bench.py` loads its prompts from the Hugging Face hub with the package `datasets`. This
module takes the place of that package and supplies the prompts of a file, such as Spec-Bench's:
JSON lines with `category`, `turns` and optionally `question_id`. The options after `--` are those
of `speed_bench.py`. Without `-m` no server is started; pass `--url` after `--` to name a running
one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from benchmarks.answers import running

#: The only configuration of the data set: the default of `speed_bench.py`'s option `--bench`.
_CONFIGURATION = "qualitative"


class Rows(Sequence[dict[str, Any]]):
    """Questions, with the part of the interface of a data set that `speed_bench.py` uses."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Rows: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        """Return a row, some rows, or a column."""
        if isinstance(key, str):
            return [row[key] for row in self._rows]
        if isinstance(key, slice):
            return Rows(self._rows[key])
        return self._rows[key]


def read_rows(file: Path) -> Rows:
    """Read questions. Their ids become strings, as in the original data set."""
    lines = file.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines if line.strip()]
    return Rows(
        [
            {
                "question_id": str(question.get("question_id", number)),
                "category": question.get("category", "all"),
                "turns": question["turns"],
            }
            for number, question in enumerate(questions, 1)
        ]
    )


def stand_in(rows: Rows) -> types.ModuleType:
    """Return a module that takes the place of `datasets`."""
    module: Any = types.ModuleType("datasets")
    module.get_dataset_config_names = lambda _repository: [_CONFIGURATION]
    module.load_dataset = lambda _repository, **_choice: rows
    own_module: types.ModuleType = module
    return own_module


@contextlib.contextmanager
def server(target: str, drafts: Sequence[str]) -> Iterator[str]:
    """Run `specgen serve` in the block, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "specgen", "serve", "-q", "-m", target, "--port", str(port)]
    for draft in drafts:
        command += ["-md", draft]
    with running(command, url):
        yield url


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after ``--``."""
    if "--" not in arguments:
        return arguments, []
    position = arguments.index("--")
    return arguments[:position], arguments[position + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("script", type=Path, help="llama.cpp's speed_bench.py")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-m", "--target", help="start a server with this target")
    parser.add_argument(
        "-md", "--draft", action="append", default=[], help="a draft of the server that is started"
    )
    own_options, their_options = split(sys.argv[1:])
    arguments = parser.parse_args(own_options)
    sys.modules["datasets"] = stand_in(read_rows(arguments.prompts))
    sys.argv = [str(arguments.script), *their_options]
    with contextlib.ExitStack() as stack:
        if arguments.target is not None:
            url = stack.enter_context(server(arguments.target, arguments.draft))
            sys.argv += ["--url", url]
        # The script ends by raising `SystemExit` with its exit code.
        runpy.run_path(str(arguments.script), run_name="__main__")


if __name__ == "__main__":
    main()
