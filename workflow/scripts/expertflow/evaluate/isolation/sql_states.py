"""Make databases that distinguish a wrong query from its reference.

A single database hides mistakes: a query that lacks a condition is right if all rows satisfy it. So
rows are made up several times, from the schema and the reference: values in its conditions and near
misses, keys that match and keys that do not, repeated values, nulls (test-suite accuracy, Zhong et
al. 2020). The same schema and reference give the same rows.
"""

import random
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

# Rows of a table in each state: one or a few, for limits and single-row groups, and more.
# None of these values is tuned to a data set.
SIZES = (12, 1, 5, 3, 8, 8, 12, 16, 24, 24)
# Chance that a value is one in the reference, or a near miss, drawn for each row: some rows
# satisfy several conditions at once, and others none.
NAMED_CHANCES = (0.95, 0.7, 0.3, 0.0)
NULL_CHANCE, GIVEN_CHANCE = 0.08, 0.5
# For tables that the reference does not read.
N_OTHER_ROWS = 3
MAX_TABLES, MAX_COLUMNS, MAX_GIVEN_VALUES, MAX_LIMIT = 40, 400, 20, 50
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
_YEAR = re.compile(r"(1[89]|20|21)\d\d")
_WORD = re.compile(r"\w+")
_FIRST_DAY = date(2020, 1, 1)
_WORDS = ("alpha", "beta", "gamma", "delta", "kappa", "omega")


@dataclass(slots=True)
class StateColumn:
    name: str
    kind: str
    nullable: bool
    is_key: bool


# Columns by the names of tables.
StateTables = dict[str, list[StateColumn]]


def read_tables(connection: sqlite3.Connection) -> StateTables:
    """List the tables of a database and their columns, as SQLite understood them."""
    named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    tables = {}
    for (name,) in connection.execute(named).fetchall()[:MAX_TABLES]:
        found = connection.execute("SELECT * FROM pragma_table_xinfo(?)", (name,)).fetchall()
        tables[name] = [
            StateColumn(column, column_kind(declared), not (not_null or key), bool(key))
            for _, column, declared, not_null, _, key, hidden in found[:MAX_COLUMNS]
            if not hidden  # nothing can be inserted into generated columns
        ]
    return tables


def read_links(connection: sqlite3.Connection, tables: StateTables) -> set[tuple[str, str]]:
    """Return pairs of columns that foreign keys link."""
    query = 'SELECT "from", "to" FROM pragma_foreign_key_list(?)'
    return {
        (here.lower(), (there or here).lower())
        for table in tables
        for here, there in connection.execute(query, (table,))
    }


def column_kind(declared: str) -> str:
    # By parts of the name in a fixed order, as in SQLite, where FLOATING POINT is an integer.
    declared = declared.upper()
    for kind, words in (
        ("date", ("DATE", "TIME")),
        ("bool", ("BOOL",)),
        ("int", ("INT", "SERIAL", "YEAR")),
        ("text", ("CHAR", "TEXT", "CLOB", "ENUM", "STRING", "UUID")),
        ("real", ("REAL", "FLOA", "DOUB", "DEC", "NUM", "MONEY")),
    ):
        if any(word in declared for word in words):
            return kind
    return "text"


def read_conditions(query: str) -> tuple[defaultdict[str, set[Any]], set[tuple[str, str]], int]:
    """Return constants by the columns compared with them, columns compared, and the largest limit.

    Names are in lower case. There are none if sqlglot cannot parse the query.
    """
    compared, links, n_rows = defaultdict[str, set[Any]](set), set[tuple[str, str]](), 0
    try:
        tree = sqlglot.parse_one(query, read="sqlite")
    except (SqlglotError, RecursionError):
        return compared, links, n_rows
    # A state needs more rows than that, or the reference's LIMIT has no effect.
    for limit in tree.find_all(exp.Limit, exp.Offset):
        count = limit.expression
        if isinstance(count, exp.Literal) and count.is_int:
            n_rows = max(n_rows, int(min(float(count.name), MAX_LIMIT)))
    for node in tree.find_all(exp.Predicate, exp.Case):
        columns = {column.name.lower() for column in _own(node, exp.Column)}
        # `a IN (SELECT b …)` compares a with b, so they need common values.
        inner = [one for one in node.args.values() if isinstance(one, exp.Query | exp.Subquery)]
        columns |= {c.name.lower() for query in inner for c in query.find_all(exp.Column)}
        constants = {_constant(literal) for literal in _own(node, exp.Literal)}
        if isinstance(node, exp.EQ | exp.NEQ | exp.In) and not constants:
            first, *others = sorted(columns) or [""]
            links |= {(first, other) for other in others}
        for column in columns:
            compared[column] |= constants
    for join in tree.find_all(exp.Join):
        for column in join.args.get("using") or []:
            # USING (a): linked with the column of the same name in the other table.
            links.add((column.name.lower(),) * 2)
    return compared, links, n_rows


def _own(node: Any, kind: Any) -> Iterator[Any]:
    """Yield the parts of a condition that are not in a subquery."""
    return (
        part
        for part in node.walk(prune=lambda one: isinstance(one, exp.Query))
        if isinstance(part, kind)
    )


def _constant(literal: Any) -> Any:
    if literal.is_string:
        return literal.name
    number = float(literal.name)
    # A neighboring value must fit into 64 bits, too.
    return int(literal.name) if literal.is_int and abs(number) < 2**62 else number


class StateMaker:
    """Fills the empty tables of a database; ``given`` has values from the data set, if any."""

    def __init__(self, connection: sqlite3.Connection, reference: str) -> None:
        self.tables = read_tables(connection)
        self.given = read_values(connection, self.tables)
        # Table names included.
        self._words = set(_WORD.findall(reference.lower()))
        constants, links, self._n_rows = read_conditions(reference)
        self._group = _join_links(links | read_links(connection, self.tables))
        self._named: defaultdict[str, list[Any]] = defaultdict(list)
        for column in sorted(constants):
            self._named[self._group.get(column, column)] += sorted(constants[column], key=repr)
        self._now = date.today()

    def fill(self, connection: sqlite3.Connection, number: int) -> None:
        """Insert the rows of a state; rows that a constraint rejects are left out."""
        # Not a secret: the same database is made again for the next answer.
        self._rng = random.Random(number)
        size = max(SIZES[number % len(SIZES)], self._n_rows + 2 if number % 2 else 0)
        # Repeated values in every other state: groups, ties and duplicates; otherwise almost none.
        width = 4 if number % 4 < 2 else 40
        # Keys start at other numbers in other states, so that `id = 1` is not always the first.
        base = 10 * (number % 3)
        for table, columns in self.tables.items():
            # A quoted name may have several words, as in "order details".
            is_read = self._words.issuperset(_WORD.findall(table.lower()))
            n_rows = size if is_read else N_OTHER_ROWS
            chances = self._rng.choices(NAMED_CHANCES, k=n_rows)
            values = [self._values(one, chances, size, width, base) for one in columns]
            marks = ", ".join("?" * len(columns))
            names = ", ".join(_quote(column.name) for column in columns)
            insert = f"INSERT OR IGNORE INTO {_quote(table)} ({names}) VALUES ({marks})"
            connection.executemany(insert, zip(*values, strict=True))

    def _values(
        self, column: StateColumn, chances: list[float], size: int, width: int, base: int
    ) -> list[Any]:
        """Return a column's values, one for each chance of a value that the reference names."""
        name, kind, random_value = column.name.lower(), column.kind, self._rng.random
        named = self._named.get(self._group.get(name, name))
        given = self.given.get(name)
        # Keys of linked tables match, except for one.
        first, n_values = (base + 1, size + 1) if name in self._group else (0, width + 1)
        values: list[Any] = []
        for place, chance in enumerate(chances):
            if named and random_value() < chance:
                values.append(self._near(self._rng.choice(named), kind))
            elif column.nullable and random_value() < NULL_CHANCE:
                values.append(None)
            elif column.is_key and not named:
                values.append(_ordinary(kind, base + place + 1, 0.0))
            elif given and random_value() < GIVEN_CHANCE:
                values.append(self._rng.choice(given))
            else:
                shift = 0.0 if first else random_value()
                values.append(_ordinary(kind, first + int(random_value() * n_values), shift))
        return values

    def _near(self, constant: Any, kind: str) -> Any:
        """Return a constant, or half of the time a value near it."""
        rng = self._rng
        exact = rng.random() < 0.5
        if kind == "date" or (isinstance(constant, str) and _DATE.match(constant)):
            return self._near_date(str(constant), exact=exact)
        if kind == "bool" and constant in (0, 1):
            return constant if exact else 1 - constant
        if isinstance(constant, int | float):
            if _YEAR.fullmatch(str(constant)) and kind == "text" and not exact:
                return f"{constant}-0{rng.randint(1, 9)}-15"
            offset = rng.choice((1, -1, 2, 0.5 if kind == "real" else 10))
            number = constant if exact else constant + offset
            return str(number) if kind == "text" else number
        text = constant.replace("%", "" if exact else rng.choice(("", "x"))).replace("_", "a")
        if exact:
            return text
        return rng.choice((text, text.upper(), text.lower(), text.title(), text + "x", text[:-1]))

    def _near_date(self, constant: str, *, exact: bool) -> str:
        found, year, rng = _DATE.match(constant), _YEAR.match(constant), self._rng
        try:
            if found:
                day = date(*map(int, found.groups()))
            elif year:
                day = date(int(year[0]), rng.randint(1, 12), rng.randint(1, 28))
            else:
                day = self._now - timedelta(days=rng.choice((0, 1, 6, 20, 80, 200, 500)))
            day += timedelta(days=0 if exact else rng.choice((-366, -40, -1, 1, 40, 366)))
        except (ValueError, OverflowError):
            day = _FIRST_DAY
        return day.isoformat() + constant[10:] if found and len(constant) > 10 else day.isoformat()


def _ordinary(kind: str, number: int, shift: float) -> Any:
    if kind == "int":
        return number
    if kind == "bool":
        return number % 2
    if kind == "real":
        return number + round(shift, 2)
    if kind == "date":
        return (_FIRST_DAY + timedelta(days=37 * number)).isoformat()
    word = _WORDS[number % len(_WORDS)]
    return word if number < len(_WORDS) else f"{word} {number}"


def _join_links(links: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map each linked column to the first of those that it is linked to, directly or not."""
    group: dict[str, str] = {}
    for one, other in sorted(links):
        first, second = group.setdefault(one, one), group.setdefault(other, other)
        low, high = sorted((first, second))  # a = b, b = c: {a: a, b: a, c: a}
        for name in [name for name, of in group.items() if of == high]:
            group[name] = low
    return group


def read_values(connection: sqlite3.Connection, tables: StateTables) -> dict[str, list[Any]]:
    """Return some values of each column of a database that has rows, by name in lower case."""
    found: dict[str, list[Any]] = {}
    for table, columns in tables.items():
        for column in columns:
            query = f"SELECT DISTINCT {_quote(column.name)} FROM {_quote(table)} LIMIT ?"
            values = [value for (value,) in connection.execute(query, (MAX_GIVEN_VALUES,))]
            found.setdefault(column.name.lower(), []).extend(values)
    return {name: values for name, values in found.items() if values}


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
