"""Constants and marks for many tests."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import pytest

from specgen.options import ContextOptions, SamplerOptions

ROOT = Path(__file__).resolve().parents[2]
#: With an f32 cache and without flash attention, rows are the same in batches of every shape,
#: except for rounding.
EXACT = ContextOptions(n_threads=1, flash_attention="off", cache_type_k="f32", cache_type_v="f32")
#: Samples from the complete distribution of the logits.
UNFILTERED = SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
#: The current time for chat templates that use it.
NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
#: All single bytes.
BYTES = [bytes((byte,)) for byte in range(256)]
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals, terminals and scripts")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernels are for Linux")
