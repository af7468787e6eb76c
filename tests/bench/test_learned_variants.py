"""Variants of real questions: other columns, other cells, and a query that asks for just these."""

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from learned_variants import variants

SCHEMA = 'CREATE TABLE t ("player" TEXT, "club" TEXT, "goals" REAL, "games" REAL)'
CELLS = [("ann o'neill", "reds", 3.0, 10.0), ("bob", "blues", 5.5, 12.0), ("cy", "reds", 7.0, 9.0)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tables.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(SCHEMA)
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", CELLS)
    return path


def record(question: str, sql: str) -> dict[str, Any]:
    return {"id": "q", "table_id": "t", "schema": SCHEMA, "question": question, "sql": sql}


def test_a_variant_asks_for_what_its_query_returns(database: Path) -> None:
    asked = record("How many Goals has bob?", """SELECT "goals" FROM t WHERE "player" = 'bob'""")
    made = list(variants([asked], database, n_each=12, seed=0))
    assert len({one["question"] for one in made}) == len(made) > 2
    with sqlite3.connect(database) as connection:
        for one in made:
            [column] = [name for name in ("goals", "games") if name in one["question"]]
            [player] = [cells[0] for cells in CELLS if cells[0] in one["question"]]
            quoted = player.replace("'", "''")
            assert one["sql"] == f"""SELECT "{column}" FROM t WHERE "player" = '{quoted}'"""
            assert connection.execute(one["sql"]).fetchall()
            assert one["table_id"] == "t" and sorted(one["schema"]) == sorted(SCHEMA)


def test_what_the_question_does_not_name_stays(database: Path) -> None:
    asked = record("What did he do?", """SELECT "goals" FROM t WHERE "player" = 'bob'""")
    assert list(variants([asked], database, n_each=5, seed=0)) == []
