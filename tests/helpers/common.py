"""What many tests need: the root of the project, options, and marks."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import pytest

from specgen.options import ContextOptions, SamplerOptions

ROOT = Path(__file__).resolve().parents[2]
#: f32 and no flash attention: rows are then equal in batches of every shape, all but for bits.
EXACT = ContextOptions(n_threads=1, flash_attention="off", cache_type_k="f32", cache_type_v="f32")
#: Draws from all that the logits say.
UNFILTERED = SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
#: A time for templates that ask for one.
NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
#: Every byte by itself.
BYTES = [bytes((byte,)) for byte in range(256)]
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals, terminals and scripts")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernels are for Linux")
