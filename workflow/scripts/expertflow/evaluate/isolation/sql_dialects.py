"""Translate schemas and queries of other databases for SQLite, using sqlglot."""

import logging
import re
from collections.abc import Iterable
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from expertflow.evaluate.isolation.rows import one_line

DIALECTS = ("postgres", "mysql", "tsql", "oracle", "bigquery", "snowflake")


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
        trees = [tree for tree in trees if not _makes_namespace(tree)]
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

    def _write(self, trees: Iterable[Any], level: Any) -> list[str]:
        try:
            trees = [self._drop_namespaces(tree) for tree in trees]
            return [tree.sql(dialect="sqlite", unsupported_level=level) for tree in trees]
        except (SqlglotError, RecursionError, KeyError) as error:
            # KeyError: the key's column is not among the table's by its exact name.
            raise self._unreadable(error) from error

    def _drop_namespaces(self, tree: Any) -> Any:
        for node in tree.find_all(exp.Table, exp.Column):
            if node.text("db").lower() in self._namespaces:
                node.set("db", None)
                node.set("catalog", None)  # shop.dbo.item
        return tree

    def _unreadable(self, error: Exception) -> UnusableError:
        # Its message underlines the position for a terminal.
        text = re.sub("\x1b\\[\\d*m", "", str(error))
        return UnusableError(f"sqlglot cannot read it as {self._dialect}: {one_line(text)}")


def _makes_namespace(tree: Any) -> bool:
    is_create = isinstance(tree, exp.Create) and tree.kind in ("SCHEMA", "DATABASE")
    return is_create or isinstance(tree, exp.Use)
