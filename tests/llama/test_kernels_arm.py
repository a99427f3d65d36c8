"""The kernels for ARM are bit-identical to AVX2, in an emulator (scripts/arm_kernels.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import arm_kernels
from scripts.arm_kernels import MissingToolError, Tools
from specgen.llama.kernels.self_test import TYPES


@pytest.fixture(scope="module")
def tools() -> Tools:
    try:
        return arm_kernels.find_tools(os.environ)
    except MissingToolError as missing:
        pytest.skip(str(missing))


def test_arm_is_bit_identical_to_avx2(tools: Tools, tmp_path: Path) -> None:
    arm_kernels.build_tests(tools, tmp_path)
    expected, different = arm_kernels.compare(tools, tmp_path)
    assert different == []
    assert set(TYPES) <= set(expected)
    assert sum(name.startswith("attention-") for name in expected) > 100
