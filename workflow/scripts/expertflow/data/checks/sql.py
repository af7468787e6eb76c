"""Check that a field is one SQL statement, and convert it to another dialect."""

import logging
from typing import TYPE_CHECKING

from expertflow.data.records import Fields
from expertflow.data.reject import Filtered, clip_message, why_too_hard
from expertflow.data.settings import FieldCheck

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

# Parsing takes about 10 s per million characters.
MAX_CHARS = 200_000

# Listed to check settings without importing sqlglot (0.1 s); a test compares.
_DIALECTS = """
    athena bigquery clickhouse databricks dax doris dremio drill druid duckdb dune exasol fabric
    hive materialize mysql oracle postgres presto prql redshift risingwave snowflake solr spark
    spark2 sqlite starrocks tableau teradata trino tsql
"""
DIALECTS = frozenset(_DIALECTS.split())


def find_problem(check: FieldCheck) -> str | None:
    """Return what is wrong with a dialect; null means sqlglot's own, the most lenient."""
    for key in ("dialect", "transpile_to"):
        name = getattr(check, key)
        if name is not None and name not in DIALECTS:
            known = ", ".join(sorted(DIALECTS))
            return f"{key} {name!r} is not a sqlglot dialect; use one of {known}"
    return None


def check_sql(text: str, _: Fields, check: FieldCheck) -> str | None:
    from sqlglot.errors import ErrorLevel, SqlglotError

    # The statements that it warns of are filtered and counted.
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
    statement, dialect = _parse(text, check.dialect), check.transpile_to
    if dialect is None:
        return None
    try:
        return statement.sql(dialect=dialect, unsupported_level=ErrorLevel.RAISE, comments=True)
    except (SqlglotError, RecursionError) as error:
        raise Filtered("sql_not_transpilable", f"to {dialect}: {clip_message(error)}") from error


def _parse(text: str, dialect: str | None) -> "exp.Expr":
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    if (reason := why_too_hard(text, max_chars=MAX_CHARS)) is not None:
        raise Filtered("sql_unparsable", reason)
    try:
        parsed = sqlglot.parse(text, read=dialect)
    except SqlglotError as error:
        raise Filtered("sql_unparsable", _words(error)) from error
    except RecursionError as error:
        raise Filtered("sql_unparsable", "nested too deeply") from error
    # A lone comment is not a statement.
    statements = [s for s in parsed if s is not None and not isinstance(s, exp.Semicolon)]
    if len(statements) > 1:
        raise Filtered("sql_several_statements", f"{len(statements)} statements, expected one")
    if not statements:
        raise Filtered("sql_unparsable", "no statement")
    found = statements[0]
    # Not lone expressions: sqlglot reads ``hello world`` as a column with an alias. Nor commands
    # such as ``VACUUM``, whose text it does not parse.
    lone = (exp.Command, exp.Condition, exp.Alias, exp.Star, exp.Tuple, exp.Interval)
    is_bare = isinstance(found, exp.Select) and not any(found.args.values())
    if isinstance(found, lone) or is_bare:
        named = dialect or "its own dialect"
        raise Filtered("sql_unparsable", f"not a statement that sqlglot knows in {named}")
    return found


def _words(error: "SqlglotError") -> str:
    # Tokenizer errors have no list.
    found = getattr(error, "errors", None) or [{}]
    description = str(found[0].get("description") or "cannot be tokenized").split(" <Token")[0]
    line, column = found[0].get("line"), found[0].get("col")
    where = f"line {line}, column {column}: " if line is not None else ""
    return where + clip_message(description)
