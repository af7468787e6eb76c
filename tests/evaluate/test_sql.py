"""Queries judged by their rows, and hostile queries that achieve nothing."""

import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from made_up_documents import case

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.tasks.sql import SqlExecution

LIMITS = Limits(n_instructions=20_000_000, n_rows=1_000, memory_bytes=256 << 20, wall_s=120)
GOLD = "SELECT name, price FROM item WHERE price > 1"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A name that would end the path, or start a parameter, if it were not quoted.
    path = tmp_path_factory.mktemp("odd ?mode=rwc&x#y%20") / "shop ?é.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, note BLOB);
        INSERT INTO item (name, price) VALUES ('pen', 1.5), ('ink', 7.25), ('pad', 0.5);
        INSERT INTO item (name, price) VALUES (CAST(x'ff41' AS TEXT), NULL);
        """
    )
    connection.close()
    return path


def _judge(
    database: Path, *predictions: str, gold: str = GOLD, limits: Limits = LIMITS
) -> list[Verdict]:
    cases = [
        case(text, gold, database=database, document_id=f"d{i}")
        for i, text in enumerate(predictions)
    ]
    task = SqlExecution()
    task.limits = limits
    return task.score(cases)


def _kinds(
    database: Path, *predictions: str, gold: str = GOLD, limits: Limits = LIMITS
) -> list[str]:
    verdicts = _judge(database, *predictions, gold=gold, limits=limits)
    assert all(verdict.correct == (verdict.kind == "correct") for verdict in verdicts)
    return [verdict.kind for verdict in verdicts]


def test_kinds(database: Path) -> None:
    expected = {
        GOLD: "correct",
        "select name as n, price from item where id < 3 order by id desc": "correct",
        "So:\n```sql\nSELECT name, price -- all\nFROM item /* ; */ WHERE price>1;\n```": "correct",
        "  WITH x AS (SELECT * FROM item) SELECT name, price FROM x WHERE price > 1 ;; ": "correct",
        "SELECT name, price FROM item": "wrong_rows",
        "SELECT price, name FROM item WHERE price > 1": "wrong_rows",
        "SELECT name FROM item WHERE price > 1": "wrong_rows",
        "VALUES (1)": "wrong_rows",
        "SELECT nope FROM item": "syntax_error",
        "SELEC name": "syntax_error",
        "I do not know": "syntax_error",
        "SELECT 'unclosed": "syntax_error",
        "": "empty",
        " ;; -- nothing": "empty",
        "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x+1 FROM n) SELECT * FROM n": (
            "too_many_rows"
        ),
        "SELECT 1; SELECT 2": "not_a_query",
        "PRAGMA writable_schema = ON": "not_a_query",
        "WITH x AS (SELECT 'y') INSERT INTO item (name) SELECT * FROM x": "not_a_query",
        "/* hm */ DROP TABLE item": "not_a_query",
        "SELECT name FROM item ORDER BY random() LIMIT 1": "not_a_query",
        "SELECT readfile('/etc/passwd')": "syntax_error",
        "SELECT 1\0; DROP TABLE item": "syntax_error",
        "SELECT zeroblob(2000000000)": "too_many_rows",
    }
    assert dict(zip(expected, _kinds(database, *expected), strict=True)) == expected


def test_endless_queries_run_out_of_their_budget_and_spare_the_others(database: Path) -> None:
    series = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n {where}) SELECT "
    explosion = series.format(where="LIMIT 1000") + "count(*) FROM n a, n b, n c, n d"
    # Sorted, so that all of it must fit into memory before the first row comes out.
    hoard = series.format(where="") + "hex(zeroblob(400000)) || x AS h FROM n ORDER BY h"
    bomb = series.format(where="") + "count(*) FROM n"
    verdicts = _judge(database, bomb, GOLD, explosion, hoard, "SELECT 1", GOLD)
    out_of_time, out_of_memory = ("timed_out", "ran out of instructions"), ("timed_out", "256 MiB")
    assert [(v.kind, v.detail.removeprefix("more than ")) for v in verdicts] == [
        out_of_time,
        ("correct", ""),
        out_of_time,
        out_of_memory,
        ("wrong_rows", ""),
        ("correct", ""),
    ]


def test_results_are_limited_in_bytes_too(database: Path) -> None:
    series = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n LIMIT 900) "
    verdict = _judge(database, series + "SELECT zeroblob(100000) FROM n")[0]
    assert verdict.kind == "too_many_rows"
    assert "bytes" in verdict.detail


def test_the_wall_clock_stops_what_instructions_do_not(database: Path) -> None:
    # A few instructions, hours long: at every place of a long text the other differs at its end.
    slow = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n LIMIT 9999) "
    slow += "SELECT sum(instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || x)) FROM n"
    started = time.perf_counter()
    # The clock also runs while the process starts, which a busy machine may take long for.
    verdicts = _judge(database, GOLD, slow, GOLD, limits=Limits(wall_s=20.0, cpu_s=600))
    assert [(v.kind, v.detail) for v in verdicts] == [
        ("correct", ""),
        ("timed_out", "no answer within 20 s"),
        ("correct", ""),
    ]
    assert time.perf_counter() - started < 300
    verdict = _judge(database, slow, limits=Limits(cpu_s=1))[0]
    assert (verdict.kind, "ended with code" in verdict.detail) == ("timed_out", True)


def test_a_query_that_explodes_while_it_is_prepared_is_stopped(database: Path) -> None:
    # Each view reads the one before it twice: 2**29 subqueries, before the first instruction.
    steps = ", ".join(f"a{i} AS (SELECT p.x FROM a{i - 1} p, a{i - 1} q)" for i in range(1, 30))
    bomb = f"WITH a0 AS (SELECT 1 AS x), {steps} SELECT count(*) FROM a29"
    assert _kinds(database, bomb, GOLD) == ["timed_out", "correct"]


def test_order_counts_only_if_the_reference_asks_for_it(database: Path) -> None:
    up, down = (f"SELECT name FROM item WHERE id < 4 ORDER BY id {way}" for way in ("", "DESC"))
    assert _kinds(database, up, down, gold=up) == ["correct", "wrong_rows"]
    assert _kinds(database, up, down, gold=f"SELECT * FROM ({up})") == ["correct", "correct"]


def test_text_that_is_not_utf8_is_still_compared(database: Path) -> None:
    gold = "SELECT name FROM item WHERE price IS NULL"
    predictions = [gold, "SELECT CAST(x'fe41' AS TEXT)"]
    assert _kinds(database, *predictions, gold=gold) == ["correct", "wrong_rows"]


def test_no_rows_agree_only_if_their_columns_do(database: Path) -> None:
    gold = "SELECT name FROM item WHERE 0"
    predictions = ["SELECT id FROM item WHERE 1 > 2", "SELECT id, name FROM item WHERE 1 > 2"]
    assert _kinds(database, *predictions, gold=gold) == ["correct", "wrong_rows"]


@pytest.mark.parametrize(
    "gold", ["SELECT nope", "DROP TABLE item", "", "SELECT zeroblob(2000000000)"]
)
def test_a_reference_that_fails_names_its_document(database: Path, gold: str) -> None:
    with pytest.raises(EvaluationError, match=r"document d0: its reference query fails"):
        _judge(database, "SELECT 1", gold=gold)


def test_a_missing_or_broken_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"document d0: its database .* is not a file"):
        _judge(tmp_path / "none.db", "SELECT 1", gold="SELECT 1")
    (tmp_path / "text.db").write_text("not a database at all" * 100)
    with pytest.raises(EvaluationError, match="not a database"):
        _judge(tmp_path / "text.db", "SELECT 1", gold="SELECT name FROM item")


def test_one_worker_serves_the_batch_and_ends_with_it(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    _judge(database, GOLD, "nonsense", GOLD)
    with pytest.raises(EvaluationError):
        _judge(database, GOLD, gold="nonsense")
    assert [process.returncode is not None for process in started] == [True, True]
