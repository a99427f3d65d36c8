"""A model in another weight type, made from a file that may be quantised already.

    python -m benchmarks.requantise -m 1.5b-q4_k_m.gguf --type q8_0 -o 1.5b-q8_0.gguf

Its answers are a little worse than those of a model that was quantised only once, and its speed is
the same: it is for comparisons with engines that read some weight types only.
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
    asked = parser.parse_args()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = TYPES[asked.type]
    options.allow_requantize = True
    files = (bytes(asked.target), bytes(asked.output))
    if llama_cpp.llama_model_quantize(*files, ctypes.byref(options)):
        sys.exit(f"{asked.target} cannot be requantised")


if __name__ == "__main__":
    main()
