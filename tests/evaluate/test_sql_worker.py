"""What runs inside the worker: one read-only database, and the comparison of rows."""

import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.evaluate.isolation import rows, sql_worker, worker
from expertflow.evaluate.isolation.rows import same_rows
from expertflow.evaluate.isolation.sql_worker import Limits, Reader, is_ordered


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


def test_the_worker_imports_nothing_but_the_standard_library() -> None:
    ours = [sql_worker, worker, rows]
    imported = {
        line.split()[1]
        for module in ours
        for line in Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
        if line.startswith(("import ", "from "))
    }
    others = imported - {module.__name__ for module in ours}
    assert {name.partition(".")[0] for name in others} <= sys.stdlib_module_names


@pytest.fixture
def item(tmp_path: Path) -> Path:
    path = tmp_path / "item.db"
    sqlite3.connect(path).executescript(
        "CREATE TABLE item (id); INSERT INTO item VALUES (1), (2)"
    ).connection.close()
    return path


ENDLESS = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT "


def test_a_database_stays_open_until_a_query_is_refused_or_runs_out(
    item: Path, tmp_path: Path
) -> None:
    reader = Reader(Limits(n_instructions=200_000, n_rows=5))
    other = tmp_path / "other.db"
    sqlite3.connect(other).executescript("CREATE TABLE pen (id)").connection.close()
    opened: list[Any] = []

    def kind(query: str, database: Path = item) -> str:
        answer = reader.run(query, database)
        opened.append(reader._open and reader._open[1])
        return answer.kind

    kinds = [kind(query) for query in ("SELECT id FROM item", "SELECT nope", "SELECT 1")]
    assert kinds == ["rows", "syntax_error", "rows"]
    assert opened[0] is opened[1] is opened[2] is not None
    for query, refused in {
        "SELECT load_extension('x')": "not_a_query",
        "WITH x AS (SELECT 1) DELETE FROM item": "not_a_query",
        ENDLESS + "count(*) FROM n": "timed_out",
        ENDLESS + "x FROM n": "too_many_rows",
    }.items():
        assert (kind(query), opened[-1]) == (refused, None)
        assert kind("SELECT id FROM item") == "rows"
    assert kind("SELECT id FROM pen", other) == "rows"
    assert kind("SELECT id FROM item", other) == "syntax_error"
    reader.close()


def test_each_query_has_a_budget_of_its_own(item: Path) -> None:
    reader = Reader(Limits(n_instructions=300_000))
    query = ENDLESS.replace("FROM n)", "FROM n LIMIT 10000)") + "count(*) FROM n"
    kinds = {reader.run(query, item).kind for _ in range(5)}
    assert kinds == {"rows"}
    assert Reader(Limits(n_instructions=50_000)).run(query, item).kind == "timed_out"
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
        (1e6, 1e6 + 1, False),
        (2**62, 2**62 + 1, False),
        (0, 1e-17, True),
        (0, 0.001, False),
        (None, 0, False),
        (None, "", False),
        ("1", 1, False),
        ("a", b"a", False),
        ("a", "A", False),
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


@given(tables, tables)
def test_unordered_equality_is_symmetric_and_weaker_than_ordered(
    left: list[tuple[Any, Any]], right: list[tuple[Any, Any]]
) -> None:
    assert same_rows(left, right, ordered=False) == same_rows(right, left, ordered=False)
    assert not same_rows(left, right, ordered=True) or same_rows(left, right, ordered=False)


def test_rows_pair_up_across_rounding_noise() -> None:
    left = [(0.1 + 0.2, 1), (0.3, 2)]
    right = [(0.1 + 0.2, 2), (0.3, 1)]
    assert sorted(left)[0][1] != sorted(right)[0][1]
    assert same_rows(left, right, ordered=False)
    assert not same_rows(left, right, ordered=True)
    assert not same_rows([(None,), (0,)], [(0,), (0,)], ordered=False)
    assert same_rows([(None,), (0,)], [(0,), (None,)], ordered=False)
