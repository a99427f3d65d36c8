"""What the pages in docs/benchmarks/ are made with: raw figures, tables, numbers, names of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Figures = Mapping[str, Any]

#: Names of the models' files, in the raw figures, as people call the models.
_NAMES = {
    "q4km.gguf": "1.5B Q4_K_M",
    "q8.gguf": "1.5B Q8_0",
    "f16.gguf": "1.5B F16",
    "s.gguf": "0.5B Q4_K_M",
    "smol.gguf": "SmolLM2",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "1.5B Q4_K_M",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "0.5B Q4_K_M",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2",
    "big.gguf": "A target of five times the cost",
    "ngram": "n-grams",
}


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def raw(name: str) -> str:
    return f"[raw](../../benchmarks/results/{name})"


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def model(name: str) -> str:
    return _NAMES.get(name, name)


def ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
