"""What runs inside the worker: one read-only database, and the comparison of rows."""

import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.evaluate import sql_worker
from expertflow.evaluate.sql_worker import Limits, clean_query, is_ordered, same_rows


def test_the_database_is_read_only_even_without_the_authorizer(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    sqlite3.connect(database).executescript("CREATE TABLE item (id)").connection.close()
    connection = sql_worker._open(database, Limits(), [])
    connection.set_authorizer(None)
    connection.execute("PRAGMA query_only = OFF")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM item")
    with pytest.raises(sqlite3.OperationalError, match="too many attached databases"):
        connection.execute("ATTACH ':memory:' AS x")
    connection.close()


def test_the_worker_imports_nothing_but_the_standard_library() -> None:
    imported = {
        line.split()[1].partition(".")[0]
        for line in Path(sql_worker.__file__).read_text(encoding="utf-8").splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported <= sys.stdlib_module_names


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
    ("query", "clean"),
    [
        ("  SELECT 1 ; ", "SELECT 1"),
        ("SELECT/**/1--x", "SELECT 1"),
        ("SELECT '--', \"/*\"; -- end", "SELECT '--', \"/*\""),
        ("SELECT 1 /* open", "SELECT 1"),
        ("SELECT 'it''s; fine'", "SELECT 'it''s; fine'"),
    ],
)
def test_clean_query(query: str, clean: str) -> None:
    assert clean_query(query) == clean


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


@settings(deadline=None)
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


@settings(deadline=None)
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
