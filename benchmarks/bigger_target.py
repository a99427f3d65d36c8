"""A target with the cost of a larger one and the text of a small one.

    python benchmarks/bigger_target.py -m 1.5b.gguf --times 5 -o bigger.gguf

Behind each layer stand copies of it whose outputs are zero: they cost what a layer costs, and add nothing. Greedy
texts of both files are equal, bit for bit. So drafts meet the prices of a larger target, and the acceptance rates of a
real one. (1.5B Q4_K_M, 5 times: 4.3 GB, the price of a 7B.)
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


def write_bigger(source: Path, times: int, output: Path) -> None:
    """Write the model with `times` as many layers."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(output, architecture)
    n_layer = f"{architecture}.block_count"
    n_layers = reader.fields[n_layer].contents() * times
    copy_metadata(reader, writer, changed={n_layer: n_layers})
    tensors: dict[str, Stored] = {}
    for tensor in reader.tensors:
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        if found is None:
            tensors[tensor.name] = tensor.data, tensor.tensor_type
            continue
        first, name = times * int(found[1]), found[2]
        for copy in range(times):
            # In all types of blocks, bytes of zero are weights of zero.
            is_zero = copy > 0 and _OUTPUTS.fullmatch(name) is not None
            data = np.zeros_like(tensor.data) if is_zero else tensor.data
            tensors[f"blk.{first + copy}.{name}"] = data, tensor.tensor_type
    write_file(writer, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    write_bigger(asked.target, asked.times, asked.output)


if __name__ == "__main__":
    main()
