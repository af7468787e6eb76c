"""Data of the benchmarks: the corpus, variants of real questions, and learning from them."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S, ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests" / "workflow"))

import learned
import monitor_overhead
from learned_variants import variants
from warm_python import warm_jobs

SCHEMA = 'CREATE TABLE t ("player" TEXT, "club" TEXT, "goals" REAL, "games" REAL)'
CELLS = [("ann o'neill", "reds", 3.0, 10.0), ("bob", "blues", 5.5, 12.0), ("cy", "reds", 7.0, 9.0)]


def test_a_variants_question_matches_its_query(tmp_path: Path) -> None:
    database = tmp_path / "tables.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute(SCHEMA)
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", CELLS)
    asked = {"id": "q", "table_id": "t", "schema": SCHEMA, "question": "How many Goals has bob?"}
    asked["sql"] = """SELECT "goals" FROM t WHERE "player" = 'bob'"""
    made = list(variants([asked], database, n_each=12, seed=0))
    assert len({one["question"] for one in made}) == len(made) > 2
    for one in made:
        [column] = [name for name in ("goals", "games") if name in one["question"]]
        [player] = [cells[0] for cells in CELLS if cells[0] in one["question"]]
        quoted = player.replace("'", "''")
        assert one["sql"] == f"""SELECT "{column}" FROM t WHERE "player" = '{quoted}'"""
        assert one["table_id"] == "t" and sorted(one["schema"]) == sorted(SCHEMA)


@pytest.mark.chain
@pytest.mark.long
def test_wikisql_runs_end_to_end(shared_data: Path, tmp_path: Path) -> None:
    source, part = shared_data / "expert-sql" / "wikisql", tmp_path / "expert-sql" / "wikisql"
    part.mkdir(parents=True)
    lines = (source / "records.jsonl").read_bytes().splitlines(keepends=True)[:300]
    (part / "records.jsonl").write_bytes(b"".join(lines))
    (part / "tables.sqlite").symlink_to(source / "tables.sqlite")
    script = [sys.executable, str(ROOT / "bench" / "learned.py"), "wikisql", "--short"]
    command = [*script, "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | warm_jobs()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"constant", "nearest", "before", "after"} <= {row["name"] for row in found["rows"]}
    assert found["metric"] == "execution_accuracy"
    assert found["n_steps"] == learned.SHORT["training"]["max_steps"]
    assert found["held_out_loss"][1] < found["held_out_loss"][0]


def test_the_share_of_a_core_is_that_of_a_running_monitor(tmp_path: Path) -> None:
    share = monitor_overhead.measure_monitor(tmp_path, dict(os.environ), 0.5, 0.02)
    assert 0 <= share < 2
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) > 1
