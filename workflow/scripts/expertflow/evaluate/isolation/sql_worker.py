"""Run untrusted SQL, in a worker process.

A query sees one SQLite database, opened read-only and immutable. An authorizer refuses everything
but SELECT, extensions stay off, files cannot be written, and budgets of instructions, rows, bytes,
memory and processor time end long queries. Besides two modules of this folder only the standard
library is imported: the process starts quickly and has nothing worth stealing.
"""

import re
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from expertflow.core.worker import serve_messages
from expertflow.evaluate.isolation.rows import (
    NO_TEXT,
    REFUSED_FUNCTIONS,
    QueryAnswer,
    Row,
    one_line,
    same_rows,
)

# Comments and quoted text are one token, so that nothing within them is read as SQL.
_TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))
      | '[^']*' | "[^"]*" | `[^`]*` | \[[^\[\]]*\]
      | (?P<word>[^\W\d]\w*)
      | .""",
    re.VERBOSE | re.DOTALL,
)
_OTHER_COMMANDS = """
    ALTER ANALYZE ATTACH BEGIN COMMIT CREATE DELETE DETACH DROP END EXPLAIN INSERT PRAGMA REINDEX
    RELEASE REPLACE ROLLBACK SAVEPOINT UPDATE VACUUM
"""
_BLANKS = " \t\r\n\f\ufeff"
_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# Random results cannot be compared: a query would be right only by chance.
_REFUSED_FUNCTIONS = REFUSED_FUNCTIONS | {"random", "randomblob"}
_INSTRUCTIONS_PER_CHECK = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one query. SQLite runs about 1e8 instructions a second on a slow core."""

    n_instructions: int = 500_000_000
    n_rows: int = 10_000
    n_query_chars: int = 100_000
    # Text functions can take quadratic time in a single instruction.
    cell_bytes: int = 1_000_000
    result_bytes: int = 32_000_000
    # SQLite's heap; the process has as much again for rows and Python.
    heap_bytes: int = 256 << 20
    memory_bytes: int = 1 << 30
    cpu_s: int = 20
    # Enforced by the caller, against what no limit here sees, e.g. a hanging disk.
    wall_s: float = 60.0


def run_query(connection: sqlite3.Connection, query: str, limits: Limits) -> QueryAnswer:
    """Run one SELECT and return its rows; any other outcome is a kind of failure."""
    if (n := limits.n_query_chars) < len(query):
        return QueryAnswer("syntax_error", f"longer than {n} characters")
    query = clean_query(query)
    if (refusal := _refuse(query)) is not None:
        return refusal
    denied: list[str] = []
    try:
        _guard(connection, limits, denied)
        with closing(connection.cursor()) as cursor:
            return _fetch(cursor.execute(query), limits)
    except MemoryError:
        return QueryAnswer("timed_out", f"more than {limits.heap_bytes >> 20} MiB")
    except sqlite3.Error as error:
        return _failure(error, denied)


def clean_query(query: str) -> str:
    parts = (" " if found["comment"] else found[0] for found in _TOKEN.finditer(query))
    # SQLite skips a byte order mark before the first word.
    return "".join(parts).rstrip("; \t\r\n").lstrip(_BLANKS)


def is_ordered(query: str) -> bool:
    level, previous = 0, ""
    for found in _TOKEN.finditer(query):
        text = found[0].upper()
        level += (text == "(") - (text == ")")
        if level == 0 and (previous, text) == ("ORDER", "BY"):
            return True
        if not (text.isspace() or found["comment"]):
            previous = text
    return False


def _refuse(query: str) -> QueryAnswer | None:
    if not query:
        return QueryAnswer("empty")
    if NO_TEXT.search(query):
        return QueryAnswer("syntax_error", "contains a NUL character or a lone surrogate")
    tokens = [found[0].upper() for found in _TOKEN.finditer(query)]
    if ";" in tokens:
        return QueryAnswer("not_a_query", "several statements")
    if tokens[0] in _OTHER_COMMANDS.split():
        return QueryAnswer("not_a_query", f"{tokens[0]} is not allowed")
    return None


def connect_file(database: Path, limits: Limits) -> sqlite3.Connection:
    # immutable: SQLite takes no locks and looks for no journal next to the file.
    uri = f"{database.as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, cached_statements=0)
    limit_connection(connection, limits)
    return connection


def limit_connection(connection: sqlite3.Connection, limits: Limits) -> None:
    # Stored text need not be UTF-8, but equal bytes should compare as equal.
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.cell_bytes)
    settings = ["temp_store = MEMORY", "trusted_schema = OFF"]
    for setting in [*settings, f"hard_heap_limit = {limits.heap_bytes}"]:
        connection.execute(f"PRAGMA {setting}").fetchall()


def _guard(connection: sqlite3.Connection, limits: Limits, denied: list[str]) -> None:
    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        is_refused_function = action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS
        if action in _ACTIONS and not is_refused_function:
            return sqlite3.SQLITE_OK
        denied.append(str(second or first or action))
        return sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)
    allow_budget(connection, limits)


def allow_budget(connection: sqlite3.Connection, limits: Limits) -> None:
    # SQLite calls the handler every so many instructions, and interrupts if it returns true.
    n_checks = iter(range(limits.n_instructions // _INSTRUCTIONS_PER_CHECK))
    connection.set_progress_handler(lambda: next(n_checks, None) is None, _INSTRUCTIONS_PER_CHECK)


def _fetch(cursor: sqlite3.Cursor, limits: Limits) -> QueryAnswer:
    rows: list[Row] = []
    n_bytes = 0
    for row in cursor:
        rows.append(row)
        n_bytes += sum(map(sys.getsizeof, row))
        if len(rows) > limits.n_rows:
            return QueryAnswer("too_many_rows", f"more than {limits.n_rows} rows")
        if n_bytes > limits.result_bytes:
            return QueryAnswer("too_many_rows", f"more than {limits.result_bytes} bytes")
    return QueryAnswer("rows", n_columns=len(cursor.description or ()), rows=tuple(rows))


def _failure(error: sqlite3.Error, denied: Sequence[str]) -> QueryAnswer:
    code = getattr(error, "sqlite_errorcode", None)
    if denied:
        return QueryAnswer("not_a_query", f"{denied[0][:100]} is not allowed")
    if code == sqlite3.SQLITE_INTERRUPT:
        return QueryAnswer("timed_out", "ran out of instructions")
    kind = "too_many_rows" if code == sqlite3.SQLITE_TOOBIG else "syntax_error"
    return QueryAnswer(kind, one_line(error))


@dataclass(slots=True)
class State:
    """A database, what the reference returns there, and whether the order of rows counts."""

    connection: sqlite3.Connection
    wanted: QueryAnswer
    ordered: bool

    def judge(self, query: str, limits: Limits) -> tuple[str, str]:
        found = run_query(self.connection, query, limits)
        if found.kind != "rows":
            return found.kind, found.detail
        same = same_rows(found.rows, self.wanted.rows, ordered=self.ordered)
        return "correct" if same and found.n_columns == self.wanted.n_columns else "wrong_rows", ""


def main(options: dict[str, Any]) -> None:
    limits = Limits(**options)
    # The last database stays open: with thousands of tables, reading the schema takes a thousand
    # times as long as most queries.
    connect = lru_cache(maxsize=1)(lambda path: connect_file(Path(path), limits))
    judges: list[Callable[[str], tuple[str, str]]] = []
    prepared: dict[str, str] = {}

    def prepare_suite(schema: str, reference: str) -> tuple[str, str]:
        # Imported here: sqlglot takes longer to import than most queries to run.
        from expertflow.evaluate.isolation.sql_suite import Suite, UnusableError

        try:
            judges.append(Suite(schema, reference, limits).judge)
        except (UnusableError, sqlite3.Error, MemoryError) as error:
            return "unusable", one_line(error) or "its databases take too much memory"
        prepared.update(schema=schema, reference=reference)
        return "rows", ""

    def prepare_database(path: str, reference: str) -> tuple[str, str]:
        try:
            connection = connect(path)
        except sqlite3.Error as error:
            return "syntax_error", one_line(error)
        wanted = run_query(connection, reference, limits)
        state = State(connection, wanted, is_ordered(clean_query(reference)))
        judges.append(lambda query: state.judge(query, limits))
        return wanted.kind, wanted.detail

    # First {schema, reference} or {database, reference}, then predictions to compare with it.
    def answer(message: dict[str, str]) -> tuple[str, str]:
        if "prediction" in message:
            return judges[0](message["prediction"])
        if message == prepared:
            return "rows", ""
        prepared.clear()
        judges.clear()  # before the next ones take memory
        if "schema" in message:
            return prepare_suite(message["schema"], message["reference"])
        return prepare_database(message["database"], message["reference"])

    serve_messages(answer, memory_bytes=limits.memory_bytes, cpu_s=limits.cpu_s)
