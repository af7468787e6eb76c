import json
import logging
from pathlib import Path

import pytest

from expertflow.data.checks.registry import build_checks
from expertflow.data.checks.sql import DIALECTS
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck


def check_sql(text: str, dialect: str | None = "sqlite", transpile_to: str | None = None) -> str:
    check = FieldCheck(field="q", check="sql", dialect=dialect, transpile_to=transpile_to)
    result: str = build_checks((check,), source="s")({"q": text})["q"]
    return result


def reason(text: str, **settings: str | None) -> str:
    with pytest.raises(Filtered) as caught:
        check_sql(text, **settings)
    assert caught.value.field == "q"
    return caught.value.reason


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "SELECT a FROM t;",
        "SELECT 1; -- and a comment",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "SELECT 1 UNION SELECT 2",
        "(SELECT 1)",
        "INSERT INTO t VALUES (1)",
        "CREATE TABLE t (a INT)",
        "DROP TABLE t",
        "SELECT 'a; b'",
    ],
)
def test_statements_pass_unchanged(text: str) -> None:
    assert check_sql(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "-- only a comment",
        "SELECT",
        "SELECT a FROM",
        "SELECT * FORM t",
        "SELECT (1",
        "hello",
        "hello world",
        "1",
        "a = 1",
        "(1, 2)",
        "VACUUM",  # taken over as a command, never parsed
        "ALTER TABLE t FOO BAR",
        "SELECT '",
        "SELECT " + "f(" * 40 + "1" + ")" * 40,
        "SELECT " + "1," * 150_000 + "1",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_statement(text: str) -> None:
    assert reason(text) == "sql_unparsable"


def test_several_statements() -> None:
    assert reason("SELECT 1; SELECT 2") == "sql_several_statements"


def test_the_dialect_counts() -> None:
    assert check_sql("SHOW TABLES", dialect="mysql") == "SHOW TABLES"
    assert reason("SHOW TABLES", dialect="sqlite") == "sql_unparsable"


def test_transpiling_rewrites() -> None:
    text = "SELECT IFNULL(`a`, 0) FROM `t` LIMIT 3"
    found = check_sql(text, dialect="mysql", transpile_to="tsql")
    assert found == "SELECT TOP 3 COALESCE([a], 0) FROM [t]"


def test_what_the_other_dialect_lacks_is_filtered() -> None:
    text = "SELECT * FROM t TABLESAMPLE (10 PERCENT)"
    settings = {"dialect": "postgres", "transpile_to": "mysql"}
    assert reason(text, **settings) == "sql_not_transpilable"


def test_a_fault_is_placed_and_quotes_little() -> None:
    with pytest.raises(Filtered) as caught:
        check_sql("SELECT a\nFROM t WHERE '" + "x" * 5000 + "' 1 2 3")
    assert caught.value.detail.startswith("line 2, column ")
    assert "xxx" not in caught.value.detail


def test_sqlglots_warnings_are_silent_and_its_logger_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("sqlglot")
    before = list(logger.filters), logger.level, logger.disabled
    assert reason("CALL foo()") == "sql_unparsable"
    assert not caplog.records
    assert (list(logger.filters), logger.level, logger.disabled) == before


def test_the_list_of_dialects_is_sqlglots() -> None:
    from sqlglot.dialects.dialect import Dialects

    assert {dialect.value for dialect in Dialects} - {""} == DIALECTS


@pytest.mark.parametrize("source", ["wikisql", "defog"])
def test_real_queries_pass(shared_data: Path, source: str) -> None:
    lines = (shared_data / "expert-sql" / source / "records.jsonl").read_bytes().splitlines()
    check = FieldCheck(field="sql", check="sql", dialect="sqlite", transpile_to="postgres")
    run = build_checks((check,), source=source)
    for line in lines[:: max(1, len(lines) // 250)]:
        run(json.loads(line))
