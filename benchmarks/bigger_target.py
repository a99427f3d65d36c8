"""A target with the cost of a larger one and the text of a small one.

    python benchmarks/bigger_target.py -m 1.5b.gguf --times 5 -o bigger.gguf

Behind each layer stand copies of it whose outputs are zero, and its feed-forward matrices may be
wider by zeros: they cost what weights cost, and add nothing. Greedy texts of both files are equal,
bit for bit. So drafts meet the prices of a larger target, and the acceptance rates of a real one.
Qwen2.5 1.5B Q4_K_M, 5 times, has the weights of a 7B (4.3 GB) and 2.5 times its keys and values;
`--times 2 --wide 3` has those of a 7B (and 672 of its 784 heads).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

from benchmarks.model_files import Stored, copy_metadata, write_file

#: What a layer adds to the hidden state is a product with these, and their biases.
_OUTPUTS = re.compile(r"(attn_output|ffn_down)\.(weight|bias)")
#: The feed-forward matrices, and the axis of their stored blocks that is its width.
_WIDTH_AXIS = {"ffn_gate.weight": 0, "ffn_up.weight": 0, "ffn_down.weight": 1}


def write_bigger(source: Path, times: int, wide: int, output: Path) -> None:
    """Write the model with `times` as many layers, their feed-forward part `wide` times as wide."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(output, architecture)
    factors = {"block_count": times, "feed_forward_length": wide}
    names = {f"{architecture}.{name}": factor for name, factor in factors.items()}
    changed = {name: reader.fields[name].contents() * factor for name, factor in names.items()}
    copy_metadata(reader, writer, changed=changed)
    tensors: dict[str, Stored] = {}
    for tensor in reader.tensors:
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        if found is None:
            tensors[tensor.name] = tensor.data, tensor.tensor_type
            continue
        first, name = times * int(found[1]), found[2]
        # In all types of blocks, bytes of zero are weights of zero.
        layer = tensor.data
        if name in _WIDTH_AXIS:
            zeros = [np.zeros_like(layer)] * (wide - 1)
            layer = np.concatenate([layer, *zeros], axis=_WIDTH_AXIS[name])
        for copy in range(times):
            is_zero = copy > 0 and _OUTPUTS.fullmatch(name) is not None
            data = np.zeros_like(layer) if is_zero else layer
            tensors[f"blk.{first + copy}.{name}"] = data, tensor.tensor_type
    write_file(writer, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--wide", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    write_bigger(asked.target, asked.times, asked.wide, asked.output)


if __name__ == "__main__":
    main()
