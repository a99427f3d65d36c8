"""Convert a model to another weight type, from a file that may be quantised already.

    python -m benchmarks.requantise -m 1.5b-q4_k_m.gguf --type q8_0 -o 1.5b-q8_0.gguf

The result is for comparisons with engines that support only some weight types. It is as fast as a
model that was quantised from the original weights, but its answers are slightly worse.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

from specgen.llama.library import llama_cpp

TYPES = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = TYPES[arguments.type]
    options.allow_requantize = True
    files = (bytes(arguments.target), bytes(arguments.output))
    if llama_cpp.llama_model_quantize(*files, ctypes.byref(options)):
        sys.exit(f"{arguments.target} cannot be requantised")


if __name__ == "__main__":
    main()
