"""The products for AMX are right, even if the tests run on a CPU without AMX.

`tests/llama/test_kernel_products.py` tests what the CPU has.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from scripts.build_kernels import (
    COMMON_FLAGS,
    INSTRUCTION_FLAGS,
    SOURCES,
    X86,
    BuildError,
    compiler,
    run,
)
from tests.helpers.common import ROOT

pytestmark = [
    pytest.mark.skipif(sysconfig.get_platform() != X86, reason="emulated with AVX2"),
    pytest.mark.slow,
]


def test_tiles_give_each_column_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    try:
        command = compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    sources = ROOT / SOURCES
    program = tmp_path / "amx_test"
    # A column alone is multiplied as on a CPU with AVX-512, which is emulated, too.
    run(
        [
            *command,
            *COMMON_FLAGS,
            "-O1",  # takes a third of the time
            *INSTRUCTION_FLAGS["avx2.cpp"].flags,
            f"-I{sources / 'tests' / 'emulated'}",
            f"-I{sources}",
            os.fspath(sources / "tests" / "amx_test.cpp"),
            "-o",
            os.fspath(program),
        ]
    )
    output = run([os.fspath(program)])
    checked = [line.removesuffix(" checked") for line in output.splitlines()]
    assert {"q4_0", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_xs", "mxfp4"} <= {*checked}
