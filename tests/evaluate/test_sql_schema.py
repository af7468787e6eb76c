"""Queries judged on databases made from the text of a schema."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from made_up_documents import one_sql_process, score

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation import sql_suite, sql_worker
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks.sql_execution import SqlExecution

LIMITS = Limits(n_instructions=20_000_000, n_rows=1_000, memory_bytes=1 << 30, wall_s=120)
TABLES = """
CREATE TABLE customers (id INT PRIMARY KEY, name VARCHAR(50), city TEXT);
CREATE TABLE orders (id INT, customer_id INT, total DECIMAL(8, 2), placed DATE);
"""
ROWS = """
INSERT INTO customers VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Rome');
INSERT INTO orders VALUES (7, 1, 5.00, '2023-01-02'), (8, 2, 9.50, '2023-02-03');
"""


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_sql_process(LIMITS):
        yield


def judge(schema: str, gold: str, *predictions: str, limits: Limits = LIMITS) -> list[Judgment]:
    attributes = {"limits": limits}
    return score(SqlExecution, predictions, gold, attributes=attributes, schema=schema)


def kinds(schema: str, gold: str, *predictions: str) -> list[str]:
    return [judgment.kind for judgment in judge(schema, gold, *predictions)]


SOME = "SELECT name FROM customers WHERE city = 'Oslo'"
COUNTED = "SELECT count(*) FROM orders WHERE total > 5"
FIRST = "SELECT name FROM customers ORDER BY id LIMIT 1"
JOINED = "SELECT c.name, sum(o.total) FROM customers c JOIN orders o ON o.customer_id = c.id"


@pytest.mark.parametrize(
    ("gold", "right", "lucky"),
    [
        # Each of the lucky ones returns the reference's rows on the given database.
        (SOME, ["select name from customers where city='Oslo'"],
         ["SELECT 'Ann'", "SELECT name FROM customers LIMIT 1",
          "SELECT name FROM customers WHERE city <> 'Rome'",
          "SELECT name FROM customers WHERE id = 1"]),
        (COUNTED, ["SELECT count(1) FROM orders WHERE NOT total <= 5"],
         ["SELECT 1", "SELECT count(*) FROM orders WHERE total >= 6",
          "SELECT count(*) FROM orders WHERE total > 5.5",
          "SELECT count(DISTINCT total) FROM orders WHERE total > 5",
          "SELECT min(total) > 1 FROM orders"]),
        (FIRST, ["SELECT name FROM customers WHERE id = (SELECT min(id) FROM customers)"],
         ["SELECT min(name) FROM customers", "SELECT name FROM customers WHERE id < 2"]),
        (f"{JOINED} GROUP BY c.id", [f"{JOINED} GROUP BY c.id, c.name ORDER BY 2"],
         [f"{JOINED} GROUP BY c.name", f"{JOINED.replace('JOIN', 'LEFT JOIN')} GROUP BY c.id",
          f"{JOINED.replace('sum', 'max')} GROUP BY c.id"]),
    ],
)  # fmt: skip
def test_lucky_hits_do_not_count(gold: str, right: list[str], lucky: list[str]) -> None:
    predictions = [gold, *right, *lucky]
    found = kinds(TABLES + ROWS, gold, *predictions)
    assert found == ["correct"] * (1 + len(right)) + ["wrong_elsewhere"] * len(lucky)
    # A schema without rows has only made-up databases.
    assert kinds(TABLES, gold, *predictions)[: 1 + len(right)] == found[: 1 + len(right)]
    assert not any(one.correct for one in judge(TABLES, gold, *lucky))


def test_queries_wrong_on_the_given_rows_are_distinguished() -> None:
    predictions = ["SELECT name FROM customers", "SELECT nope", "DROP TABLE customers", ""]
    wrong = ["wrong_rows", "syntax_error", "not_a_query", "empty"]
    assert kinds(TABLES + ROWS, SOME, *predictions) == wrong


def test_large_numbers_and_late_days_are_not_faults() -> None:
    late = "SELECT id FROM orders WHERE placed < '9999-12-31' AND total < 9999999999999999999999"
    gold = f"{late} LIMIT 99999999999"
    assert kinds(TABLES, gold, gold, late, "SELECT 7") == ["correct", "correct", "wrong_rows"]


def test_the_same_databases_are_made_in_each_process() -> None:
    predictions = [SOME, "SELECT name FROM customers LIMIT 1"]
    expected = judge(TABLES, SOME, *predictions)
    assert judge(TABLES, SOME, *predictions, limits=Limits()) == expected


def test_databases_are_made_once_for_all_answers_to_a_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(sql_worker, "serve_messages", lambda answer, **_: served.append(answer))
    suite = mock.Mock(wraps=sql_suite.Suite)
    monkeypatch.setattr(sql_suite, "Suite", suite)
    sql_worker.main({})
    for reference in (SOME, SOME, f"{SOME} LIMIT 1", SOME):
        assert served[0]({"schema": TABLES, "reference": reference}) == ("rows", "")
        assert served[0]({"prediction": reference})[0] == "correct"
    assert suite.call_count == 3


SHOP = """
CREATE SCHEMA IF NOT EXISTS shop; USE shop;
CREATE TABLE shop.item (id INT AUTO_INCREMENT, kind ENUM('pen', 'ink'), PRIMARY KEY (id));
INSERT INTO shop.item (kind) VALUES ('pen'), ('ink');
"""
NAMED = """
CREATE TABLE [dbo].[t]([id] [int] PRIMARY KEY, [name] [nvarchar](9));
INSERT INTO [dbo].[t] VALUES (1, 'a'), (2, 'b');
"""
TRIGGERED = """
CREATE TABLE t (id INT, name TEXT);
CREATE TRIGGER u AFTER INSERT ON t BEGIN UPDATE t SET name = 'x'; END;
INSERT INTO t VALUES (1, 'a'), (2, 'b');
"""


@pytest.mark.parametrize(
    ("schema", "gold", "right", "wrong"),
    [
        (SHOP, "SELECT id FROM shop.item WHERE kind = 'pen'",
         "SELECT item.id FROM item WHERE 'pen' = shop.item.kind", "SELECT 1"),
        (NAMED, "SELECT TOP 1 [name] FROM [dbo].[t] ORDER BY [id]",
         "SELECT name FROM t WHERE id = (SELECT MIN(dbo.t.id) FROM dbo.t)",
         "SELECT MIN(name) FROM t"),
        # Triggers would also fire on made-up rows.
        (TRIGGERED, "SELECT name FROM t WHERE id = 1", "SELECT name FROM t WHERE 1 = id",
         "SELECT 'a'"),
    ],
)  # fmt: skip
def test_schemas_and_queries_of_other_databases_are_translated(
    schema: str, gold: str, right: str, wrong: str
) -> None:
    assert kinds(schema, gold, gold, right, wrong) == ["correct", "correct", "wrong_elsewhere"]


def test_an_unknown_name_is_still_an_error() -> None:
    gold = "SELECT kind FROM shop.item WHERE id = 1"
    assert kinds(SHOP, gold, gold.replace("shop", "other")) == ["syntax_error"]


def test_booleans_have_no_other_numbers() -> None:
    schema = "CREATE TABLE t (id INT PRIMARY KEY, active BOOLEAN)"
    found = "SELECT id FROM t WHERE active"
    others = [f"{found} <> 0", f"{found} = 0", "SELECT id FROM t"]
    right = ["correct"] * 2
    assert kinds(schema, f"{found} = 1", found, *others)[:2] == right
    assert "correct" not in kinds(schema, f"{found} = 1", *others[1:])


SPINS = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize(
    ("schema", "gold", "why"),
    [
        ("a table of people", "SELECT 1", "its schema cannot be built: near"),
        ("", "SELECT 1", "its schema has no table"),
        (TABLES, "SELECT nope FROM customers", "its reference query fails .*no such column: nope"),
        (TABLES, "SELECT 1 FROM customers WHERE 1 > 2", "returns the same rows on every database"),
        (TABLES, "SELECT 5", "returns the same rows on every database"),
        (f"CREATE TABLE t (a); INSERT INTO t {SPINS}", "SELECT a FROM t", "cannot be built"),
        ("ATTACH 'x.db' AS x; CREATE TABLE t (a)", "SELECT a FROM t", "cannot be built: not auth"),
        ("CREATE TABLE t (a); PRAGMA writable_schema = 1", "SELECT a FROM t", "cannot be built"),
        ("CREATE VIRTUAL TABLE t USING fts5(a)", "SELECT a FROM t", "cannot be built"),
        (f"CREATE TABLE t (a); -- {'x' * 200_000}", "SELECT a FROM t", "longer than 200000"),
        ("CREATE TABLE t (a); INSERT INTO t VALUES ('\0')", "SELECT 1", "embedded null character"),
        ("CREATE TABLE `t` (`a` INT", "SELECT a FROM t", "cannot be built: incomplete input"),
    ],
)
def test_an_unusable_reference_has_a_reason(schema: str, gold: str, why: str) -> None:
    with pytest.raises(EvaluationError, match=why):
        judge(schema, gold, gold)
