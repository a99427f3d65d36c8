"""Read TOML files that users write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specgen.errors import UsageError


def read_toml(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Return the content of a file; empty if it `is_optional` and there is none. Raise `UsageError` if it cannot
    be read, or is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        if is_optional and isinstance(error, FileNotFoundError):
            return {}
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}", correct(file)) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}", correct(file)) from error
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply", correct(file)) from error


def correct(file: object) -> str:
    """Return a hint for a file with a mistake."""
    return f"correct {file}, or move it away"
