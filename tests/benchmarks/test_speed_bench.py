"""llama.cpp's server benchmark gets our prompts instead of a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import speed_bench

#: What llama.cpp's script does with its data set.
SCRIPT = """
import sys
from datasets import get_dataset_config_names, load_dataset

(name,) = get_dataset_config_names("nvidia/SPEED-Bench")
rows = load_dataset("nvidia/SPEED-Bench", name=name, split="test")
print(name, rows["category"], [dict(row) for row in rows], sys.argv[1:])
raise SystemExit(0)
"""


def test_a_script_reads_the_prompts_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "More."]},
        {"turns": ["Why?"]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["speed_bench", str(script), "--prompts", str(prompts), "--", "--limit", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit) as ended:
        speed_bench.main()
    assert ended.value.code == 0
    rows = [
        {"question_id": "81", "category": "writing", "turns": ["Write.", "More."]},
        {"question_id": "2", "category": "all", "turns": ["Why?"]},
    ]
    expected = f"qualitative ['writing', 'all'] {rows} ['--limit', '2']\n"
    assert capsys.readouterr().out == expected
