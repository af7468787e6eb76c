"""Queries judged by their rows, harmless hostile queries, and the comparison of rows."""

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_documents import score, spec
from support import PATIENCE_S

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation import sql_worker
from expertflow.evaluate.isolation.rows import same_rows
from expertflow.evaluate.isolation.sql_worker import Limits, Reader, is_ordered
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks.sql_execution import SqlExecution

LIMITS = Limits(n_instructions=20_000_000, n_rows=1_000, memory_bytes=256 << 20, wall_s=120)
GOLD = "SELECT name, price FROM item WHERE price > 1"
SERIES = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n"


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
    return score(
        SqlExecution,
        predictions,
        gold,
        artifacts={"database": database},
        attributes={"limits": limits},
    )


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
        "VALUES (1)": "wrong_rows",
        "SELECT nope FROM item": "syntax_error",
        "I do not know": "syntax_error",
        "SELECT 'unclosed": "syntax_error",
        "": "empty",
        " ;; -- nothing": "empty",
        f"{SERIES}) SELECT * FROM n": "too_many_rows",
        "SELECT 1; SELECT 2": "not_a_query",
        "PRAGMA writable_schema = ON": "not_a_query",
        "WITH x AS (SELECT 'y') INSERT INTO item (name) SELECT * FROM x": "not_a_query",
        "/* hm */ DROP TABLE item": "not_a_query",
        "SELECT name FROM item ORDER BY random() LIMIT 1": "not_a_query",
        "SELECT 1\0; DROP TABLE item": "syntax_error",
        "SELECT zeroblob(2000000000)": "too_many_rows",
        f"SELECT '{'x' * 100_000}'": "syntax_error",
        "\ufeff EXPLAIN SELECT 1": "not_a_query",
        f"{SERIES} LIMIT 1000) SELECT * FROM n": "wrong_rows",
        f"{SERIES} LIMIT 1001) SELECT * FROM n": "too_many_rows",
    }
    assert dict(zip(expected, _kinds(database, *expected), strict=True)) == expected


def test_a_refusal_says_why(database: Path) -> None:
    expected = {
        "SELECT 1; SELECT 2": "several statements",
        "/* hm */ drop TABLE item": "DROP is not allowed",
        "SELECT name FROM item ORDER BY random()": "random is not allowed",
        "SELECT hex(randomblob(4))": "randomblob is not allowed",
        "SELECT nope FROM item": "no such column: nope",
        "SELECT 1\0": "holds a character that no text may hold",
        f"SELECT '{'x' * 100_000}'": "longer than 100000 characters",
        f"{SERIES}) SELECT * FROM n": "more than 1000 rows",
    }
    details = [verdict.detail for verdict in _judge(database, *expected)]
    assert dict(zip(expected, details, strict=True)) == expected


def test_a_manifest_names_the_database_and_a_record_the_metric() -> None:
    task = SqlExecution(spec(task="sql_execution"))
    assert task.metric == "execution_accuracy"
    assert task.artifacts == task.fields == {"database"}
    assert task.required == ("artifacts.database",)
    assert task.tool_versions()["sqlite"] == sqlite3.sqlite_version


def test_endless_queries_run_out_of_their_budget_and_spare_the_others(database: Path) -> None:
    explosion = f"{SERIES} LIMIT 1000) SELECT count(*) FROM n a, n b, n c, n d"
    # Sorting needs all of it in memory before the first row.
    hoard = f"{SERIES}) SELECT hex(zeroblob(400000)) || x AS h FROM n ORDER BY h"
    bomb = f"{SERIES}) SELECT count(*) FROM n"
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
    verdict = _judge(database, f"{SERIES} LIMIT 900) SELECT zeroblob(100000) FROM n")[0]
    assert (verdict.kind, verdict.detail) == ("too_many_rows", "more than 32000000 bytes")


def test_the_wall_clock_stops_what_instructions_do_not(database: Path) -> None:
    # A few instructions that take hours: a match fails at its end at every place of a long text.
    slow = f"{SERIES} LIMIT 9999) SELECT "
    slow += "sum(instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || x)) FROM n"
    with pytest.raises(EvaluationError, match=r"timed_out: no answer within 0\.2 s"):
        _judge(database, GOLD, gold=slow, limits=Limits(wall_s=0.2, cpu_s=600))
    verdicts = _judge(database, GOLD, slow, GOLD, limits=Limits(cpu_s=1, wall_s=PATIENCE_S))
    assert [verdict.kind for verdict in verdicts] == ["correct", "timed_out", "correct"]
    assert "ended with code" in verdicts[1].detail


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
    with pytest.raises(EvaluationError, match=r"document d7: its reference query fails"):
        _judge(database, "SELECT 1", gold=gold)


def test_a_missing_or_broken_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"document d7: its database .* is not a file"):
        _judge(tmp_path / "none.db", "SELECT 1", gold="SELECT 1")
    (tmp_path / "text.db").write_text("not a database at all" * 100)
    with pytest.raises(EvaluationError, match="not a database"):
        _judge(tmp_path / "text.db", "SELECT 1", gold="SELECT name FROM item")


def test_the_database_is_read_only_even_without_the_authorizer(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    sqlite3.connect(database).executescript("CREATE TABLE item (id)").connection.close()
    connection = sql_worker._connect(database, Limits())
    connection.execute("PRAGMA query_only = OFF")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM item")
    with pytest.raises(sqlite3.OperationalError, match="too many attached databases"):
        connection.execute("ATTACH ':memory:' AS x")
    connection.close()


def test_a_connection_is_kept_until_a_query_is_refused(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def count(*words: Any, **settings: Any) -> sqlite3.Connection:
        opened.append(connect(*words, **settings))
        # Some builds of SQLite have them.
        for name in ("readfile", "writefile", "edit", "fts3_tokenizer", "load_extension"):
            opened[-1].create_function(name, 1, str)
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", count)
    reader = Reader(LIMITS)
    for query, refusal in {
        "SELECT edit(1)": "edit is not allowed",
        "SELECT readfile('/etc/passwd')": "readfile is not allowed",
        "SELECT writefile(1)": "writefile is not allowed",
        "SELECT fts3_tokenizer('simple')": "fts3_tokenizer is not allowed",
        "SELECT load_extension('x')": "load_extension is not allowed",
        "SELECT zeroblob(2000000000)": "string or blob too big",
    }.items():
        n_opened = len(opened)
        for harmless in (GOLD, f"SELECT {'x' * 300}", "SELECT 2"):
            assert len(reader.run_query(harmless, database).detail) in (0, 200)
        assert len(opened) == n_opened + 1
        assert reader.run_query(query, database).detail == refusal
    reader.close()
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_each_query_has_a_budget_of_its_own(database: Path) -> None:
    reader = Reader(Limits(n_instructions=300_000))
    query = f"{SERIES} LIMIT 10000) SELECT count(*) FROM n"
    kinds = {reader.run_query(query, database).kind for _ in range(5)}
    assert kinds == {"rows"}
    assert Reader(Limits(n_instructions=50_000)).run_query(query, database).kind == "timed_out"
    reader.close()


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order /* x */\nby a LIMIT 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'ORDER BY' FROM t", False),
        ('SELECT "order" by', False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT ')' FROM (SELECT '(' ORDER BY 1)", False),
    ],
)
def test_is_ordered_looks_at_the_outermost_select(query: str, ordered: bool) -> None:
    assert is_ordered(query) == ordered


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1.0, True),
        (1, 1.0000001, True),
        (1, 1.00001, False),
        (1_000_000, 1_000_001, False),
        (2**62, 2**62 + 1, False),
        (0, 1e-17, True),
        (0, 0.001, False),
        (None, 0, False),
        ("1", 1, False),
        ("a", b"a", False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1.5, False),
    ],
)
def test_cells(left: Any, right: Any, same: bool) -> None:
    assert same_rows([(left,)], [(right,)], ordered=True) == same
    assert same_rows([(right,)], [(left,)], ordered=False) == same


cells = st.none() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(["a", "b", b"a"])
tables = st.lists(st.tuples(cells, cells), max_size=8)


@given(tables, st.randoms(use_true_random=False))
def test_rows_are_a_multiset_with_tolerance(
    rows: list[tuple[Any, Any]], rng: random.Random
) -> None:
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
    assert same_rows([(None,), (0,)], [(0,), (None,)], ordered=False)
