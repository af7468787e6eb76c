"""Queries judged on databases made from the text of a schema."""

import pytest
from made_up_documents import score

from expertflow.core.errors import EvaluationError
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


def judge(schema: str, gold: str, *predictions: str) -> list[Judgment]:
    attributes = {"limits": LIMITS}
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
        # Each of the lucky ones has the reference's rows on the given database.
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
def test_hits_by_luck_are_none(gold: str, right: list[str], lucky: list[str]) -> None:
    predictions = [gold, *right, *lucky]
    found = kinds(TABLES + ROWS, gold, *predictions)
    assert found == ["correct"] * (1 + len(right)) + ["wrong_elsewhere"] * len(lucky)
    # Without rows of its own, all databases are made up.
    assert kinds(TABLES, gold, *predictions)[: 1 + len(right)] == found[: 1 + len(right)]
    assert not any(one.correct for one in judge(TABLES, gold, *lucky))


def test_what_is_wrong_on_the_given_rows_is_told_apart() -> None:
    predictions = ["SELECT name FROM customers", "SELECT nope", "DROP TABLE customers", ""]
    wrong = ["wrong_rows", "syntax_error", "not_a_query", "empty"]
    assert kinds(TABLES + ROWS, SOME, *predictions) == wrong


def test_large_numbers_and_late_days_are_no_fault() -> None:
    late = "SELECT id FROM orders WHERE placed < '9999-12-31' AND total < 9999999999999999999999"
    gold = f"{late} LIMIT 99999999999"
    assert kinds(TABLES, gold, gold, late, "SELECT 7") == ["correct", "correct", "wrong_rows"]


def test_the_same_databases_are_made_each_time() -> None:
    predictions = [SOME, "SELECT name FROM customers LIMIT 1"]
    assert judge(TABLES, SOME, *predictions) == judge(TABLES, SOME, *predictions)


def test_another_dialect_is_read_by_sqlglot() -> None:
    schema = "CREATE TABLE `t` (`a` INT NOT NULL AUTO_INCREMENT, `b` ENUM('x', 'y'), PRIMARY KEY (`a`)) ENGINE=InnoDB;"  # noqa: E501
    gold = "SELECT `a` FROM `t` WHERE IF(`b` = 'x', 1, 0) = 1"
    other = "SELECT a FROM t WHERE b = 'y'"
    assert [one.correct for one in judge(schema, gold, gold, other)] == [True, False]


SPINS = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize(
    ("schema", "gold", "why"),
    [
        ("a table of people", "SELECT 1", "its schema cannot be built: near"),
        ("", "SELECT 1", "its schema has no table"),
        (TABLES, "SELECT nope FROM customers", "its reference query fails .*no such column: nope"),
        (TABLES, "SELECT 1 FROM customers WHERE 1 > 2", "returns the same on every database"),
        (TABLES, "SELECT 5", "returns the same on every database"),
        (f"CREATE TABLE t (a); INSERT INTO t {SPINS}", "SELECT a FROM t", "cannot be built"),
        ("ATTACH 'x.db' AS x; CREATE TABLE t (a)", "SELECT a FROM t", "cannot be built: not auth"),
        ("CREATE TABLE t (a); PRAGMA writable_schema = 1", "SELECT a FROM t", "cannot be built"),
        ("CREATE VIRTUAL TABLE t USING fts5(a)", "SELECT a FROM t", "cannot be built"),
        (f"CREATE TABLE t (a); -- {'x' * 200_000}", "SELECT a FROM t", "longer than 200000"),
    ],
)
def test_what_cannot_judge_says_why(schema: str, gold: str, why: str) -> None:
    with pytest.raises(EvaluationError, match=why):
        judge(schema, gold, gold)
