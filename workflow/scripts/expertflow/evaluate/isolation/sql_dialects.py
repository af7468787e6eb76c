"""Translate schemas and queries of other databases for SQLite, using sqlglot.

``Translator(dialect)`` translates a schema as is. With ``simplify``, parts that only the other
database understands are dropped: type sizes, indexes, engines, settings, schema names.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.isolation.sql_states import column_kind

DIALECTS = ("postgres", "mysql", "tsql", "oracle", "bigquery", "snowflake")
# Syntax that only one of them uses.
_MARKS = {
    "mysql": r"`|\bAUTO_INCREMENT\b|\bENGINE\s*=|\bON UPDATE CURRENT_|^DELIMITER\b"
    # A key among the columns; a column of that name has a type, ``key VARCHAR(9)``.
    r"|,\s*(?:(?:FULLTEXT|SPATIAL|UNIQUE)\s+)?(?:INDEX|KEY)\s+\w+\s*\(\s*[a-z_]",
    "postgres": r"\bSET client_encoding\b|\bpg_catalog\.|\bOWNER TO\b|^COPY\s|\bplpgsql\b",
    "tsql": r"\[[a-z_]\w*\]|\bIDENTITY\s*\(|\bNVARCHAR\b|^\s*GO\s*$",
}
# Syntax that sqlglot does not parse, with its replacement. Triggers and routines contain
# semicolons: SQL Server reads them as a batch, MySQL's client up to another delimiter. They fill no
# table, because a dump's rows are final.
_REWRITES = {
    "mysql": ((r"^DELIMITER[ \t]+(?!;[ \t\r]*$).*?(?:^DELIMITER[ \t]+;[ \t\r]*$|\Z)", ""),),
    "tsql": (
        (
            r"^[ \t]*CREATE\s+(?:OR\s+ALTER\s+)?(?:FUNCTION|PROC|PROCEDURE|TRIGGER)\b"
            r".*?(?=^[ \t]*GO[ \t\r]*$|\Z)",
            "",
        ),
        # SQL Server ends no statement with a semicolon: its tools read lines.
        (r"^[ \t]*(?:SET[ \t]+IDENTITY_INSERT\b[^\n]*|GO[ \t\r]*)$", ";"),
        (r"^(?=[ \t]*(?:ALTER|CREATE|INSERT)\b)", ";"),
        (r"\bTEXTIMAGE_ON\s+\[?\w+\]?|\bWITH\s+(?:NO)?CHECK\b(?=\s+ADD\b)", ""),
        (r",\s*INDEX\s+\[?\w+\]?\s+(?:UNIQUE\s+)?(?:NON)?CLUSTERED\s*\([^()]*\)", ""),
    ),
}
_ROUTINE = re.compile(
    r"(?:OR\s+REPLACE\s+)?(?:DEFINER\s*=\s*\S+\s+)?(?:EVENT|EXTENSION|FUNCTION|PROCEDURE|TRIGGER)\b",
    re.IGNORECASE,
)
_COPY = re.compile(
    r"^COPY[ \t]+(?P<table>[^\n]+?)[ \t]+FROM[ \t]+stdin;[ \t\r]*\n(?P<rows>.*?)^\\\.[ \t\r]*$",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
_COPY_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_COPY_CONTROLS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
# ``ST_GeomFromText('POINT(1 2)', 4326)``: a location is its text.
_PLACE = re.compile(r"(?:ST_)?\w+From(?:Text|WKB)", re.IGNORECASE)
_TYPES = {"int": "INTEGER", "real": "REAL", "date": "TIMESTAMP", "bool": "BOOLEAN", "text": "TEXT"}
_SETTING_COMMANDS = frozenset({"ALTER", "GRANT", "LOCK", "REVOKE", "SET", "UNLOCK"})


class UnusableError(Exception):
    """The reference cannot be used to judge; the message is the reason."""


def likely_dialects(schema: str) -> list[str]:
    """Return the dialects whose syntax a schema uses, or all: its queries are read in one."""
    return [name for name, mark in _MARKS.items() if re.search(mark, schema, re.I | re.M)] or list(
        DIALECTS
    )


class Translator:
    """Translates a schema, then queries on it; without a dialect, texts are already SQLite's."""

    def __init__(self, dialect: str | None = None, *, simplify: bool = False) -> None:
        self._dialect, self._simplify = dialect, simplify
        # Default schemas, which a query may name where the dump does not.
        self._namespaces = {"dbo", "public"}

    def translate_schema(self, text: str) -> list[str]:
        if self._dialect is None:
            return [text]
        if self._simplify:
            text = _simplify_text(text, self._dialect)
        trees = self._parse(text)
        if self._simplify:
            tables = [table for tree in trees for table in tree.find_all(exp.Table)]
            self._namespaces |= {table.db.lower() for table in tables if table.db}
            trees = _simplify_schema(trees)
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
        dialect = sqlglot.Dialect.get_or_raise(self._dialect)
        # sqlglot does not know all types of MySQL, e.g. POINT; as a user-defined type it becomes
        # text, like any other that SQLite lacks.
        dialect.SUPPORTS_USER_DEFINED_TYPES |= self._simplify
        try:
            return [tree for tree in sqlglot.parse(text, read=dialect) if tree is not None]
        except (SqlglotError, RecursionError) as error:
            raise self._unreadable(error) from error

    def _write(self, trees: Iterable[Any], level: Any) -> list[str]:
        try:
            if self._simplify:
                trees = [_drop_names(tree, self._namespaces) for tree in trees]
            return [tree.sql(dialect="sqlite", unsupported_level=level) for tree in trees]
        except (SqlglotError, RecursionError, KeyError) as error:
            # KeyError: the key's column is not among the table's by its exact name.
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UnusableError:
        # Its message underlines the position for a terminal.
        text = re.sub("\x1b\\[\\d*m", "", str(error))
        return UnusableError(f"sqlglot cannot read it as {self._dialect}: {one_line(text)}")


def _simplify_text(text: str, dialect: str) -> str:
    """Remove or rewrite the parts of a dump that sqlglot does not parse."""
    for pattern, other in _REWRITES.get(dialect, ()):
        text = re.sub(pattern, other, text, flags=re.I | re.M | re.S)
    if dialect == "postgres":
        text = _COPY.sub(_insert_copied, text)
        if re.search(r"^COPY\s", text, re.I | re.M):
            raise UnusableError(
                "COPY from a file or with options is not supported; use pg_dump --inserts"
            )
    return text


def _insert_copied(found: re.Match[str]) -> str:
    r"""Return the rows of a COPY as an INSERT: ``1\tAnn\t\N`` is ``('1', 'Ann', NULL)``."""
    lines = [line.rstrip("\r").split("\t") for line in found["rows"].split("\n")[:-1]]
    rows = [f"({', '.join(map(_quote_copied, cells))})" for cells in lines]
    return f"INSERT INTO {found['table']} VALUES {', '.join(rows)};" if rows else ""


def _quote_copied(cell: str) -> str:
    if cell == r"\N":
        return "NULL"
    text = _COPY_ESCAPE.sub(lambda m: _COPY_CONTROLS.get(m[1], m[1]), cell)
    return "'" + text.replace("'", "''") + "'"


def _drop_names(tree: Any, namespaces: set[str]) -> Any:
    """Drop schema names from table names, and the N of N'text'."""
    for node in list(tree.find_all(exp.Table, exp.Column, exp.National)):
        if isinstance(node, exp.National):
            node.replace(exp.Literal.string(node.name))
        elif node.text("db").lower() in namespaces:
            node.set("db", None)
            node.set("catalog", None)  # `shop.dbo.item` -> `item`
    return tree


def _simplify_schema(trees: Iterable[Any]) -> list[Any]:
    """Return tables with plain columns and keys, views, rows and whatever is not a setting."""
    settings = (
        exp.Alter, exp.Comment, exp.Commit, exp.Drop, exp.Grant, exp.Rollback, exp.Select,
        exp.Semicolon, exp.Set, exp.Transaction, exp.Use,
    )  # fmt: skip
    kept: list[Any] = []
    schemas: dict[str, Any] = {}
    for tree in trees:
        if isinstance(tree, exp.Create) and tree.kind in ("TABLE", "VIEW"):
            tree.set("properties", None)  # ENGINE=…, character sets, where it is stored
            if tree.kind == "TABLE" and isinstance(tree.this, exp.Schema):
                schemas[tree.this.this.name.lower()] = tree.this  # for keys of ALTER TABLE below
            kept.append(tree)
        elif isinstance(tree, exp.Alter) and (schema := schemas.get(tree.this.name.lower())):
            # Dumps add keys after the rows.
            for action in tree.args.get("actions") or []:
                added = action.expressions if isinstance(action, exp.AddConstraint) else [action]
                schema.set("expressions", [*schema.expressions, *added])
        elif isinstance(tree, exp.Insert):
            for node in list(tree.find_all(exp.Anonymous, exp.Cast, exp.Introducer)):
                node.replace(_plain_value(node))
            kept.append(tree)
        elif isinstance(tree, exp.Command):
            word = tree.name.partition(" ")[0].upper()
            is_routine = word == "CREATE" and _ROUTINE.match(tree.text("expression").lstrip())
            kept += [] if word in _SETTING_COMMANDS or is_routine else [tree]
        elif not isinstance(tree, (exp.Create, *settings)):
            kept.append(tree)
    for schema in schemas.values():
        columns = [
            _plain_column(one) for one in schema.expressions if isinstance(one, exp.ColumnDef)
        ]
        keys = [key for one in schema.expressions if (key := _plain_key(one)) is not None]
        schema.set("expressions", [*columns, *keys])
        kept += [_read_truth(schema.this, one) for one in columns if one.kind.name == "BOOLEAN"]
    return kept


def _plain_value(node: Any) -> Any:
    """Return a row's value without syntax that SQLite lacks."""
    if isinstance(node, exp.Cast):
        # A cast to a time would leave the year; the column's own type is enough.
        return node.this
    if isinstance(node, exp.Introducer):
        text = node.expression
        # Bytes, which may include NUL: the text of a statement cannot contain it.
        is_binary = node.name.lower() == "_binary"
        return exp.HexString(this=text.name.encode().hex()) if is_binary else text
    return node.expressions[0] if _PLACE.fullmatch(node.name) and node.expressions else node


def _read_truth(table: Any, column: Any) -> Any:
    """Return an UPDATE that turns the boolean texts of Postgres, t and f, into 1 and 0."""
    name = exp.column(column.this.copy())
    return exp.Update(
        this=table.copy(),
        expressions=[name.eq(exp.paren(name.eq("t")))],
        where=exp.Where(this=name.isin("t", "f")),
    )


def _plain_column(column: Any) -> Any:
    declared = column.kind.this.name if isinstance(column.kind, exp.DataType) else ""
    kind = "bool" if declared == "BIT" else column_kind(declared)  # SQL Server has no BOOLEAN
    parts = [one.kind for one in column.constraints]
    kept = [plain for part in parts if (plain := _plain_part(part)) is not None]
    filled = (
        exp.AutoIncrementColumnConstraint,
        exp.DefaultColumnConstraint,
        exp.GeneratedAsIdentityColumnConstraint,
    )
    if any(isinstance(part, filled) and not _plain_default(part) for part in parts):
        # Rows leave it out, and nothing here fills it.
        kept = [one for one in kept if not isinstance(one, exp.NotNullColumnConstraint)]
    return exp.ColumnDef(
        this=column.this.copy(),
        kind=exp.var(_TYPES[kind]),
        constraints=[exp.ColumnConstraint(kind=one) for one in kept],
    )


def _plain_part(part: Any) -> Any:
    """Return what SQLite understands of a column's constraint, or null."""
    if isinstance(part, exp.NotNullColumnConstraint) and not part.args.get("allow_null"):
        return exp.NotNullColumnConstraint()
    if isinstance(part, (exp.PrimaryKeyColumnConstraint, exp.UniqueColumnConstraint)):
        return type(part)()
    if isinstance(part, exp.Reference):
        return exp.Reference(this=part.this.copy())
    return _plain_default(part) or _plain_check(part)


def _plain_default(part: Any) -> Any:
    """Return a default that is not computed, or null."""
    if not isinstance(part, exp.DefaultColumnConstraint):
        return None
    value = part.this.unnest()
    value = value.this if isinstance(value, exp.Cast) else value
    if isinstance(value, exp.CurrentTimestamp):
        value = exp.CurrentTimestamp()  # SQLite's has no precision
    plain = (exp.Boolean, exp.CurrentDate, exp.CurrentTimestamp, exp.Literal, exp.National)
    is_plain = isinstance(value, (*plain, exp.Neg, exp.Null))
    return exp.DefaultColumnConstraint(this=value.copy()) if is_plain else None


def _plain_check(part: Any) -> Any:
    """Return a check that only compares columns with constants, or null."""
    plain = (
        exp.CheckColumnConstraint, exp.Column, exp.Connector, exp.Identifier, exp.Literal, exp.Neg,
        exp.Not, exp.Paren, exp.Predicate,
    )  # fmt: skip
    if isinstance(part, exp.CheckColumnConstraint) and all(
        isinstance(node, plain) and not isinstance(node, exp.SubqueryPredicate)
        for node in part.walk()
    ):
        return part.copy()
    return None


def _plain_key(part: Any) -> Any:
    """Return a table's key, link or check, without name and options, or null."""
    first, *others = (isinstance(part, exp.Constraint) and part.expressions) or [part]
    if isinstance(first, exp.ForeignKey) and (target := first.args.get("reference")):
        reference = exp.Reference(this=target.this.copy())
        return exp.ForeignKey(expressions=_names(first.expressions), reference=reference)
    if isinstance(first, exp.UniqueColumnConstraint):
        return exp.UniqueColumnConstraint(this=exp.Schema(expressions=_key_names(first, others)))
    if isinstance(first, (exp.PrimaryKey, exp.PrimaryKeyColumnConstraint)):
        key = exp.PrimaryKey(expressions=_key_names(first, others))
        # Named: sqlglot looks up the columns of an unnamed key by their exact case.
        return exp.Constraint(this=exp.to_identifier("main"), expressions=[key])
    return _plain_check(first)


def _key_names(key: Any, others: Iterable[Any]) -> list[Any]:
    # SQL Server's PRIMARY KEY CLUSTERED (a, b) has its columns in a part next to or below it.
    kinds = (exp.ClusteredColumnConstraint, exp.NonClusteredColumnConstraint)
    for part in (key.this, *others):
        if isinstance(part, kinds):
            return _names(part.this)
    schema = key if key.expressions or not isinstance(key.this, exp.Schema) else key.this
    return _names(schema.expressions)


def _names(parts: Iterable[Any]) -> list[Any]:
    found = [part.find(exp.Identifier) for part in parts]
    return [name.copy() for name in found if name is not None]
