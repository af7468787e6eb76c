"""Compare queries on several databases made from the text of a schema.

The first database has the text's own rows, if it has any; the others are made up
(``sql_states``). A database on which the reference has no answer, or a different one when rows are
read in reverse, proves nothing and is left out. Schemas and queries of other databases are
translated for SQLite by sqlglot.
"""

import logging
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from expertflow.evaluate.isolation.rows import QueryAnswer, one_line, same_rows
from expertflow.evaluate.isolation.sql_states import StateMaker
from expertflow.evaluate.isolation.sql_worker import (
    Limits,
    State,
    allow_budget,
    clean_query,
    is_ordered,
    limit_connection,
    run_query,
)

N_STATES = 20
DIALECTS = ("postgres", "mysql", "tsql", "oracle", "bigquery", "snowflake")
MAX_SCHEMA_CHARS = 200_000
# What a schema may do to the empty in-memory database that it fills.
_BUILDING = {
    sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_DELETE, sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_READ, sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_UPDATE,
}  # fmt: skip


class UnusableError(Exception):
    """The reference cannot be used to judge; the message is the reason."""


class Translator:
    """Translates a schema, then queries on it; without a dialect, texts are already SQLite's."""

    def __init__(self, dialect: str | None = None) -> None:
        self._dialect = dialect
        self._namespaces: set[str] = set()

    def translate_schema(self, text: str) -> list[str]:
        if self._dialect is None:
            return [text]
        trees = self._parse(text)
        # SQLite has no namespaces: in ``CREATE SCHEMA shop; CREATE TABLE shop.item (…)`` the table
        # is item, and shop.item in a query is the same.
        tables = [table for tree in trees for table in tree.find_all(exp.Table)]
        self._namespaces = {table.db.lower() for table in tables if table.db}
        trees = [
            tree
            for tree in trees
            if not isinstance(tree, exp.Use)
            and not (isinstance(tree, exp.Create) and tree.kind in ("SCHEMA", "DATABASE"))
        ]
        for kind in (kind for tree in trees for kind in tree.find_all(exp.DataType)):
            # SQLite has no enumerated types.
            if kind.is_type("enum", "set"):
                kind.replace(exp.DataType.build("text"))
        # A schema may lose what SQLite lacks; a query may not.
        return self._write(trees, ErrorLevel.IGNORE)

    def translate_query(self, text: str) -> str:
        """Return a query for SQLite; raise UnusableError if part of it would be lost."""
        if self._dialect is None:
            return text
        return "; ".join(self._write(self._parse(text), ErrorLevel.RAISE))

    def _parse(self, text: str) -> list[Any]:
        logging.getLogger("sqlglot").setLevel(logging.ERROR)
        try:
            return [tree for tree in sqlglot.parse(text, read=self._dialect) if tree is not None]
        except (SqlglotError, RecursionError) as error:
            raise self._unreadable(error) from error

    def _write(self, trees: Sequence[Any], level: Any) -> list[str]:
        try:
            for node in (node for tree in trees for node in tree.find_all(exp.Table, exp.Column)):
                if node.text("db").lower() in self._namespaces:
                    node.set("db", None)
                    node.set("catalog", None)  # shop.dbo.item
            return [tree.sql(dialect="sqlite", unsupported_level=level) for tree in trees]
        except (SqlglotError, RecursionError, KeyError) as error:
            # KeyError: the key's column is not among the table's by its exact name.
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UnusableError:
        # Its message underlines the position for a terminal.
        text = re.sub("\x1b\\[\\d*m", "", str(error))
        return UnusableError(f"sqlglot cannot read it as {self._dialect}: {one_line(text)}")


class Suite:
    """The databases of one reference; raises UnusableError if it cannot be used to judge."""

    def __init__(self, schema: str, reference: str, limits: Limits) -> None:
        self._limits = limits
        given, self._translator = _build(schema, limits)
        self._reference = self._translator.translate_query(reference)
        self._ordered = is_ordered(clean_query(self._reference))
        self.states: list[State] = []
        maker = StateMaker(given, self._reference)
        if not maker.tables:
            raise UnusableError("its schema has no tables")
        # Tables, views and indexes in the order of their creation, without rows.
        own = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        layout = [sql for (sql,) in given.execute(own)]
        if maker.given:
            self._add(given, is_given=True)
        for number in range(N_STATES):
            made = _open(limits)
            for statement in layout:
                made.execute(statement)
            maker.fill(made, number)
            self._add(made)
        if len({state.wanted.rows for state in self.states}) < 2:
            raise UnusableError("its reference returns the same rows on every database made for it")

    def judge(self, prediction: str) -> tuple[str, str]:
        """Return the kind of judgment of a prediction, and its detail."""
        try:
            prediction = self._translator.translate_query(prediction)
        except UnusableError as error:
            return "syntax_error", str(error)
        for number, state in enumerate(self.states):
            kind, detail = state.judge(prediction, self._limits)
            if kind != "correct":
                return ("wrong_elsewhere" if number and kind == "wrong_rows" else kind), detail
        return "correct", ""

    def _add(self, connection: sqlite3.Connection, *, is_given: bool = False) -> None:
        wanted = run_query(connection, self._reference, self._limits)
        if wanted.kind != "rows" and (is_given or not self.states):
            detail = f"{wanted.kind}: {wanted.detail}" if wanted.detail else wanted.kind
            raise UnusableError(f"its reference query fails ({detail})")
        connection.set_authorizer(None)
        # If this changes the order of rows, the reference does not determine it.
        connection.execute("PRAGMA reverse_unordered_selects = ON")
        again = run_query(connection, self._reference, self._limits)
        connection.set_authorizer(None)
        connection.execute("PRAGMA reverse_unordered_selects = OFF")
        is_ordered_here = self._ordered and _agree(wanted, again, ordered=True)
        if is_given or (wanted.kind == "rows" and _agree(wanted, again, ordered=False)):
            self.states.append(State(connection, wanted, is_ordered_here))


def _agree(one: QueryAnswer, other: QueryAnswer, *, ordered: bool) -> bool:
    return one.kind == other.kind and same_rows(one.rows, other.rows, ordered=ordered)


def _build(schema: str, limits: Limits) -> tuple[sqlite3.Connection, Translator]:
    """Return a database as the schema describes it, and the translator that read it."""
    if len(schema) > MAX_SCHEMA_CHARS:
        raise UnusableError(f"its schema is longer than {MAX_SCHEMA_CHARS} characters")
    reasons: list[str] = []
    # Try the text unchanged, then translated from a dialect.
    for translator in map(Translator, (None, *DIALECTS)):
        connection = _open(limits)
        try:
            _run_script(connection, translator.translate_schema(schema), limits)
        except (sqlite3.Error, UnusableError, ValueError) as error:
            # ValueError: a character that no SQL may contain, such as NUL.
            connection.close()
            reasons.append(one_line(error))
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                # It would take as long in any dialect.
                break
        else:
            return connection, translator
    raise UnusableError(f"its schema cannot be built: {reasons[0]}")


def _open(limits: Limits) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    limit_connection(connection, limits)
    return connection


def _run_script(connection: sqlite3.Connection, statements: Sequence[str], limits: Limits) -> None:
    def authorize(action: int, *_: str | None) -> int:
        if action == sqlite3.SQLITE_CREATE_TRIGGER:
            # Ignored without an error: made-up rows would fire it later, unguarded.
            return sqlite3.SQLITE_IGNORE
        return sqlite3.SQLITE_OK if action in _BUILDING else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)
    allow_budget(connection, limits)
    for statement in statements:
        connection.executescript(statement)
    connection.set_authorizer(None)
    connection.set_progress_handler(None, 0)
