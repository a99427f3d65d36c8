"""Write a target that costs as much as a larger model and generates the text of a small one.

    python benchmarks/bigger_target.py -m 1.5b.gguf --times 5 -o bigger.gguf

Each layer is followed by copies of itself whose outputs are zero, and its feed-forward matrices can
be widened with zeros. These weights cost as much as any others, and change nothing: the text is the
same, bit for bit. So a draft meets the costs of a larger target, with the acceptance rate that it
has with the small one.

Qwen2.5 1.5B in Q4_K_M with `--times 5` has the weights of a 7B model (4.3 GB) and 2.5 times its KV
cache; with `--times 2 --wide 3` it has the weights and the KV cache of a 7B (and 672 attention
heads in all layers together, instead of 784).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

from benchmarks.model_files import Stored, copy_metadata, write_file

#: The last matrices of a layer's two parts, and their biases. If they are zero, the layer adds
#: nothing to the hidden state.
_OUTPUTS = re.compile(r"(attn_output|ffn_down)\.(weight|bias)")
#: The feed-forward matrices, and the axis of the stored blocks along which they are widened.
_WIDTH_AXIS = {"ffn_gate.weight": 0, "ffn_up.weight": 0, "ffn_down.weight": 1}


def write_bigger(source: Path, times: int, wide: int, output: Path) -> None:
    """Write the model with `times` times the layers, each with `wide` times its feed-forward size.

    Args:
        source: The model's file.
        times: How many copies of each layer there are, the layer itself included.
        wide: The factor of the feed-forward size.
        output: The file to write.
    """
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(output, architecture)
    factors = {"block_count": times, "feed_forward_length": wide}
    names = {f"{architecture}.{name}": factor for name, factor in factors.items()}
    changed = {name: reader.fields[name].contents() * factor for name, factor in names.items()}
    copy_metadata(reader, writer, changed=changed)
    tensors: dict[str, Stored] = {}
    for tensor in reader.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        if match is None:
            tensors[tensor.name] = tensor.data, tensor.tensor_type
            continue
        first_layer = times * int(match[1])
        name = match[2]
        # In every weight type, a block of zero bytes has zero weights.
        layer = tensor.data
        if name in _WIDTH_AXIS:
            zeros = [np.zeros_like(layer)] * (wide - 1)
            layer = np.concatenate([layer, *zeros], axis=_WIDTH_AXIS[name])
        for copy in range(times):
            is_zero = copy > 0 and _OUTPUTS.fullmatch(name) is not None
            data = np.zeros_like(layer) if is_zero else layer
            tensors[f"blk.{first_layer + copy}.{name}"] = data, tensor.tensor_type
    write_file(writer, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5, help="factor of the number of layers")
    parser.add_argument("--wide", type=int, default=1, help="factor of the feed-forward size")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    write_bigger(arguments.target, arguments.times, arguments.wide, arguments.output)


if __name__ == "__main__":
    main()
