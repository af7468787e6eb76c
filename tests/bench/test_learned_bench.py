"""The bench of what is learned: its data, its table, and the whole chain on a few real records."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import learned

N_RECORDS = 300


def row(name: str, n_correct: int, low: float = 0.1) -> dict[str, Any]:
    change = {"difference": 0.2, "ci95": [low, 0.3], "change": "better"}
    return {
        "name": name,
        "n_correct": n_correct,
        "n_examples": 100,
        "value_fraction": n_correct / 100,
        "ci95": [0.0, 1.0],
        "reason": None,
        "expert_less_this": change,
    }


def test_the_bar_is_the_better_of_constant_and_template() -> None:
    others = [row("nearest", 50, low=-0.1), row("after", 40)]
    assert learned.beats_bar([row("constant", 3), row("template", 9), *others]) is True
    assert learned.beats_bar([row("constant", 3), row("template", 9, low=-0.01), *others]) is False
    assert learned.beats_bar([row("constant", 3, low=-0.01), row("template", 9), *others]) is True
    assert learned.beats_bar(others) is None


@pytest.mark.chain
def test_wikisql_runs_end_to_end(shared_data: Path, tmp_path: Path) -> None:
    """A few steps on some of the records: rows and words are there, whatever the figures."""
    source, part = shared_data / "expert-sql" / "wikisql", tmp_path / "expert-sql" / "wikisql"
    part.mkdir(parents=True)
    shutil.copy(source / "tables.sqlite", part)
    lines = (source / "records.jsonl").read_bytes().split(b"\n")
    (part / "records.jsonl").write_bytes(b"\n".join(lines[:N_RECORDS]) + b"\n")
    script = [sys.executable, str(ROOT / "bench" / "learned.py"), "wikisql", "--short"]
    command = [*script, "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"constant", "nearest", "before", "after"} <= {row["name"] for row in found["rows"]}
    assert found["metric"] == "execution_accuracy"
    assert found["n_steps"] == learned.SHORT["training"]["max_steps"]
    assert found["held_out_loss"][1] < found["held_out_loss"][0]
