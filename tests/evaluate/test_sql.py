"""Queries judged by their rows, hostile queries, which do no harm, and the comparison of rows."""

import random
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlglot
from hypothesis import given
from hypothesis import strategies as st
from made_up_documents import one_sql_process, score, spec
from support import PATIENCE_S

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation.rows import one_line, same_rows
from expertflow.evaluate.isolation.sql_worker import Limits, connect_file, is_ordered, run_query
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks.sql_execution import SqlExecution

LIMITS = Limits(n_instructions=20_000_000, memory_bytes=256 << 20, wall_s=120)
GOLD = "SELECT name, price FROM item WHERE price > 1"
SERIES = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n"


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_sql_process(LIMITS):
        yield


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Unquoted, this name would end the path or start a parameter.
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
) -> list[Judgment]:
    files, attributes = {"database": database}, {"limits": limits}
    return score(SqlExecution, predictions, gold, artifacts=files, attributes=attributes)


def _kinds(database: Path, *predictions: str, gold: str = GOLD) -> list[str]:
    return [verdict.kind for verdict in _judge(database, *predictions, gold=gold)]


def test_kinds_and_their_reasons(database: Path) -> None:
    right, wrong = ("correct", ""), ("wrong_rows", "")
    # Null if the message is SQLite's.
    expected: dict[str, tuple[str, str | None]] = {
        GOLD: right,
        "select name as n, price from item where id < 3 order by id desc": right,
        "So:\n```sql\nSELECT name, price -- all\nFROM item /* ; */ WHERE price>1;\n```": right,
        "  WITH x AS (SELECT * FROM item) SELECT name, price FROM x WHERE price > 1 ;; ": right,
        "SELECT name, price FROM item": wrong,
        "SELECT price, name FROM item WHERE price > 1": wrong,
        "VALUES (1)": wrong,
        "SELECT nope FROM item": ("syntax_error", "no such column: nope"),
        "I do not know": ("syntax_error", None),
        "SELECT 'unclosed": ("syntax_error", None),
        "SELECT 1\0; DROP TABLE item": (
            "syntax_error", "contains a NUL character or a lone surrogate"),
        f"SELECT '{'x' * 99_991}'": wrong,
        f"SELECT '{'x' * 99_992}'": ("syntax_error", "longer than 100000 characters"),
        "": ("empty", ""),
        " ;; -- nothing": ("empty", ""),
        "SELECT 1; SELECT 2": ("not_a_query", "several statements"),
        "PRAGMA writable_schema = ON": ("not_a_query", "PRAGMA is not allowed"),
        "WITH x AS (SELECT 'y') INSERT INTO item (name) SELECT * FROM x": ("not_a_query", None),
        "/* hm */ drop TABLE item": ("not_a_query", "DROP is not allowed"),
        "SELECT name FROM item ORDER BY random()": ("not_a_query", "random is not allowed"),
        "SELECT hex(randomblob(4))": ("not_a_query", "randomblob is not allowed"),
        "\ufeff EXPLAIN SELECT 1": ("not_a_query", "EXPLAIN is not allowed"),
        "SELECT zeroblob(1000000)": wrong,
        "SELECT zeroblob(1000001)": ("too_many_rows", None),
        f"{SERIES} LIMIT 10000) SELECT * FROM n": wrong,
        f"{SERIES} LIMIT 10001) SELECT * FROM n": ("too_many_rows", "more than 10000 rows"),
        f"{SERIES} LIMIT 900) SELECT zeroblob(100000) FROM n": (
            "too_many_rows", "more than 32000000 bytes"),
    }  # fmt: skip
    for query, verdict in zip(expected, _judge(database, *expected), strict=True):
        kind, why = expected[query]
        assert (verdict.kind, verdict.correct) == (kind, kind == "correct"), query
        assert why is None or verdict.detail == why, query


def test_a_manifest_names_the_database_and_a_record_the_metric() -> None:
    task = SqlExecution(spec(task="sql_execution"))
    assert (task.metric, task.required) == (
        "execution_accuracy", ("artifacts.database or fields.schema",)
    )  # fmt: skip
    assert task.artifacts == {"database"} and task.fields == {"database", "schema"}
    assert task.tool_versions()["sqlite"] == sqlite3.sqlite_version
    assert "sqlglot" not in task.tool_versions()
    by_schema = SqlExecution(spec(task="sql_execution", fields={"schema": "{schema}"}))
    assert by_schema.tool_versions()["sqlglot"] == sqlglot.__version__


def test_endless_queries_run_out_of_their_budget_and_spare_the_others(database: Path) -> None:
    explosion = f"{SERIES} LIMIT 1000) SELECT count(*) FROM n a, n b, n c, n d"
    # Sorting needs all of it in memory before the first row.
    hoard = f"{SERIES}) SELECT hex(zeroblob(400000)) || x AS h FROM n ORDER BY h"
    bomb = f"{SERIES}) SELECT count(*) FROM n"
    # Each view reads the previous one twice: 2**29 subqueries, before the first instruction.
    steps = ", ".join(f"a{i} AS (SELECT p.x FROM a{i - 1} p, a{i - 1} q)" for i in range(1, 30))
    unprepared = f"WITH a0 AS (SELECT 1 AS x), {steps} SELECT count(*) FROM a29"
    verdicts = _judge(database, bomb, GOLD, explosion, hoard, "SELECT 1", GOLD, unprepared, GOLD)
    instructions, memory = "ran out of instructions", "more than 256 MiB"
    assert [verdict.detail for verdict in verdicts[:6]] == [
        instructions, "", instructions, memory, "", ""
    ]  # fmt: skip
    kinds = ["correct", "timed_out", "timed_out", "wrong_rows", "correct", "timed_out", "correct"]
    assert [verdict.kind for verdict in verdicts] == ["timed_out", *kinds]


def test_the_wall_clock_stops_queries_that_instructions_do_not(database: Path) -> None:
    # A few instructions that take hours: a match fails at its end at every position of a long text.
    slow = f"{SERIES} LIMIT 9999) SELECT "
    slow += "sum(instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || x)) FROM n"
    with pytest.raises(EvaluationError, match=r"timed_out: no answer within 0\.2 s"):
        _judge(database, GOLD, gold=slow, limits=Limits(wall_s=0.2, cpu_s=600))
    verdicts = _judge(database, GOLD, slow, GOLD, limits=Limits(cpu_s=1, wall_s=PATIENCE_S))
    assert [verdict.kind for verdict in verdicts] == ["correct", "timed_out", "correct"]
    assert "exited with code" in verdicts[1].detail


def test_rows_their_order_and_their_columns_are_compared(database: Path) -> None:
    up, down = (f"SELECT name FROM item WHERE id < 4 ORDER BY id {way}" for way in ("", "DESC"))
    assert _kinds(database, up, down, gold=up) == ["correct", "wrong_rows"]
    # Order counts only if the reference has ORDER BY.
    assert _kinds(database, up, down, gold=f"SELECT * FROM ({up})") == ["correct", "correct"]
    no_utf8 = "SELECT name FROM item WHERE price IS NULL"
    predictions = [no_utf8, "SELECT CAST(x'fe41' AS TEXT)"]
    assert _kinds(database, *predictions, gold=no_utf8) == ["correct", "wrong_rows"]
    # Empty results agree only if their columns do.
    predictions = ["SELECT id FROM item WHERE 1 > 2", "SELECT id, name FROM item WHERE 1 > 2"]
    gold = "SELECT name FROM item WHERE 0"
    assert _kinds(database, *predictions, gold=gold) == ["correct", "wrong_rows"]


def test_a_reference_that_fails_names_its_document(database: Path) -> None:
    for gold in ("SELECT nope", "DROP TABLE item", "", "SELECT zeroblob(2000000000)"):
        with pytest.raises(EvaluationError, match="document d7: its reference query fails"):
            _judge(database, "SELECT 1", gold=gold)


def test_a_missing_or_broken_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"document d7: its database .* is not a file"):
        _judge(tmp_path / "none.db", "SELECT 1", gold="SELECT 1")
    for known, files in (("none", {}), ("b, c", {"c": tmp_path, "b": tmp_path})):
        with pytest.raises(EvaluationError, match=rf"no artifact 'database' .*known: {known}\)"):
            score(SqlExecution, ["SELECT 1"], "SELECT 1", artifacts=files)
    (tmp_path / "text.db").write_text("not a database at all" * 100)
    with pytest.raises(EvaluationError, match="not a database"):
        _judge(tmp_path / "text.db", "SELECT 1", gold="SELECT name FROM item")


def test_rows_in_a_write_ahead_log_are_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (a)")
    with pytest.raises(EvaluationError, match=r"document d7: .*a\.db-wal has changes that its"):
        (tmp_path / "link.db").symlink_to(path)
        _judge(tmp_path / "link.db", "SELECT 1", gold="SELECT 1")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert _kinds(path, "SELECT * FROM t", gold="SELECT a FROM t") == ["correct"]
    connection.close()


def test_more_databases_than_a_process_may_open(database: Path, tmp_path: Path) -> None:
    for number in range(64):
        shutil.copy(database, tmp_path / f"{number}.db")
        assert _kinds(tmp_path / f"{number}.db", GOLD) == ["correct"]


def test_the_database_is_read_only_even_without_the_authorizer(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    sqlite3.connect(database).executescript("CREATE TABLE item (id)").connection.close()
    connection = connect_file(database, Limits())
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM item")
    with pytest.raises(sqlite3.OperationalError, match="too many attached databases"):
        connection.execute("ATTACH ':memory:' AS x")
    with pytest.raises(sqlite3.OperationalError, match=r"not authorized|no such function"):
        connection.execute("SELECT load_extension('x')")
    connection.close()


def test_a_message_is_one_line_of_text() -> None:
    assert one_line("no column\n  \ud800 here") == "no column ? here"


def test_functions_that_reach_files_are_refused(database: Path) -> None:
    connection = connect_file(database, LIMITS)
    for name in ("edit", "readfile", "writefile", "fts3_tokenizer", "load_extension"):
        # Some builds of SQLite have them.
        connection.create_function(name, 1, str)
        refusal = run_query(connection, f"SELECT {name}('x')", LIMITS)
        assert refusal.detail == f"{name} is not allowed"
        assert run_query(connection, GOLD, LIMITS).kind == "rows"
    connection.close()


def test_each_query_has_its_own_budget(database: Path) -> None:
    connection = connect_file(database, LIMITS)
    query = f"{SERIES} LIMIT 10000) SELECT count(*) FROM n"
    kinds = {run_query(connection, query, Limits(n_instructions=300_000)).kind for _ in range(5)}
    assert kinds == {"rows"}
    assert run_query(connection, query, Limits(n_instructions=50_000)).kind == "timed_out"
    bytes_of_row = Limits(result_bytes=sys.getsizeof(1))
    assert run_query(connection, "SELECT 1", bytes_of_row).kind == "rows"
    connection.close()
    # Nor does a query that needs most of the memory leave any of it behind.
    limits = Limits(n_query_chars=1_000_000, heap_bytes=5_000_000)
    gold, prediction = (f"SELECT '{letter * 900_000}'" for letter in "ab")
    [verdict] = _judge(database, prediction, gold=gold, limits=limits)
    assert verdict.kind == "wrong_rows"


def test_is_ordered_looks_at_the_outermost_select() -> None:
    expected = {
        "SELECT count(*) FROM t ORDER BY a": True,
        "SELECT a FROM t order /* x */\nby a LIMIT 1": True,
        "SELECT a FROM (SELECT a FROM t ORDER BY a)": False,
        "SELECT rank() OVER (ORDER BY a) FROM t": False,
        "SELECT 'ORDER BY' FROM t": False,
        'SELECT "order" by': False,
        "SELECT a FROM t -- ORDER BY a": False,
        "SELECT ')' FROM (SELECT '(' ORDER BY 1)": False,
    }
    assert {query: is_ordered(query) for query in expected} == expected


def test_cells() -> None:
    infinity = float("inf")
    same: list[tuple[Any, Any]] = [(1, 1.0), (1, 1.0000000001), (0, 1e-17), (infinity, infinity)]
    numbers = [(1, 1.0000001), (1_000_000, 1_000_001), (2**62, 2**62 + 1), (0, 0.001)]
    # Julian days, money.
    numbers += [(2460000.5, 2460002.5), (2460000.5, 2460000.51), (1234567.88, 1234567.89)]
    others = [(None, 0), ("1", 1), ("a", b"a"), (infinity, 1.5)]
    for left, right in (*same, *numbers, *others):
        equal = (left, right) in same
        assert same_rows([(left,)], [(right,)], ordered=True) == equal
        assert same_rows([(right,)], [(left,)], ordered=False) == equal


cells = st.none() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(["a", "b", b"a"])
tables = st.lists(st.tuples(cells, cells), max_size=8)


@given(tables, st.randoms(use_true_random=False))
def test_rows_are_a_multiset(rows: list[tuple[Any, Any]], rng: random.Random) -> None:
    def disturb(value: Any) -> Any:
        return value * (1 + 1e-12) if isinstance(value, float) else value

    shuffled = [tuple(map(disturb, row)) for row in rows]
    rng.shuffle(shuffled)
    assert same_rows(rows, shuffled, ordered=False)
    assert not same_rows(rows, [*shuffled, (None, None)], ordered=False)
    if rows:
        assert not same_rows(rows, [("other", "row"), *shuffled[1:]], ordered=False)


def test_rows_pair_up_across_rounding_noise() -> None:
    left = [(0.1 + 0.2, 1), (0.3, 2)]
    right = [(0.1 + 0.2, 2), (0.3, 1)]
    assert sorted(left)[0][1] != sorted(right)[0][1]
    assert same_rows(left, right, ordered=False)
    assert not same_rows(left, right, ordered=True)
    assert not same_rows([(None,), (0,)], [(0,), (0,)], ordered=False)
    assert same_rows([(None,), (0,), (0.5,)], [(0.0,), (0.5,), (None,)], ordered=False)
