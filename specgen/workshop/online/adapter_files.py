"""The changes that a draft learnt, as a LoRA adapter in llama.cpp's form of GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specgen.atomic import new_beside
from specgen.workshop.distil.transformer import LAYER_MATRICES, Parameters


def write_adapter(path: Path, changes: Parameters, architecture: str) -> None:
    """Write a LoRA as `specgen.workshop.distil.lora` has it, in float16. Raises `OSError`."""
    from gguf import GGUFWriter

    with new_beside(path) as new:
        writer = GGUFWriter(new, architecture)
        try:
            writer.add_type("adapter")
            writer.add_string("adapter.type", "lora")
            rank = changes[f"{LAYER_MATRICES[0]}.lora_a"].shape[1]
            writer.add_float32("adapter.lora.alpha", float(rank))  # nothing is scaled
            for name in LAYER_MATRICES:
                for part in ("lora_a", "lora_b"):
                    for layer, values in enumerate(changes[f"{name}.{part}"]):
                        full_name = f"blk.{layer}.{name}.weight.{part}"
                        writer.add_tensor(full_name, np.asarray(values, np.float16))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        new.replace(path)


def read_adapter(path: Path) -> Parameters | None:
    """The LoRA in a file; None if it cannot be read, or is none of ours."""
    from gguf import GGUFReader

    try:
        tensors = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}
        n_layer = 1 + max(int(name.split(".")[1]) for name in tensors)
        found: dict[str, Any] = {}
        for name in LAYER_MATRICES:
            for part in ("lora_a", "lora_b"):
                layers = [tensors[f"blk.{i}.{name}.weight.{part}"] for i in range(n_layer)]
                found[f"{name}.{part}"] = np.stack(layers).astype(np.float32)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return found
