"""Generate questions about ten pairs of tables, the SQL that answers them, and the rows."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator
from expertflow.data.sources.generated.sql_tables import DOMAINS, Domain, Table

N_PARENT_ROWS = 24
N_CHILD_ROWS = 160
# SQLite writes its version to bytes 96-99 of a database, for information only
# (https://www.sqlite.org/fileformat.html); a fixed one keeps files equal on every machine.
SQLITE_VERSION_BYTES = (3_040_000).to_bytes(4, "big")

_SHOW = ("List", "Show", "Find", "Give me", "Return", "Display", "Get")
_HAVING = ("with", "that have", "having")
_WORDS = {"Show": _SHOW, "show": tuple(word.lower() for word in _SHOW), "having": _HAVING}
_COUNT = (
    "How many {} are there?",
    "Count the {}?",
    "What is the number of {}?",
    "Tell me how many {} exist?",
)
_COMPARE = (
    (">", ("above", "over", "greater than", "more than", "higher than")),
    ("<", ("below", "under", "less than", "lower than")),
    (">=", ("of at least", "not below", "of no less than")),
    ("<=", ("of at most", "not above", "of no more than")),
    ("=", ("of exactly", "equal to")),
)
_AGGREGATES = (
    ("AVG", ("average", "mean")),
    ("MAX", ("highest", "maximum", "largest")),
    ("MIN", ("lowest", "minimum", "smallest")),
    ("SUM", ("total", "summed")),
)
_ORDERS = (
    ("DESC", ("descending order", "decreasing order", "order from high to low")),
    ("ASC", ("ascending order", "increasing order", "order from low to high")),
)

# Part of a question, with its SQL.
Pair = tuple[str, str]
# The SQL that answers a question, and wordings of it.
Ask = tuple[str, ...]


def generate(*, n_documents: int, seed: int, directory: Path) -> dict[str, Path]:
    """Write ``records.jsonl`` and ``database.sqlite``, on which all gold answers run."""
    generator.generate_records(make_record, n_documents=n_documents, seed=seed, directory=directory)
    database = directory / "database.sqlite"
    _write_database(database, seed=seed)
    return {"database": database}


def _write_database(path: Path, *, seed: int) -> None:
    rng, connection = Random(f"rows {seed}"), sqlite3.connect(path)
    # SQLite's default varies by how it was built; the file's hash must not.
    connection.execute("PRAGMA page_size = 4096")
    for domain in DOMAINS:
        _fill(connection, domain.parent, n_rows=N_PARENT_ROWS, rng=rng)
        _fill(connection, domain.child, n_rows=N_CHILD_ROWS, rng=rng)
    connection.commit()
    connection.close()
    with path.open("r+b") as stream:
        stream.seek(96)
        stream.write(SQLITE_VERSION_BYTES)


def _fill(connection: sqlite3.Connection, table: Table, *, n_rows: int, rng: Random) -> None:
    connection.execute(table.ddl)
    is_person = table.label.values is generator.GIVEN_NAMES
    seconds = generator.FAMILY_NAMES if is_person else generator.NOUNS
    for identity in range(1, n_rows + 1):
        label = f"{rng.choice(table.label.values)} {rng.choice(seconds)}"
        row = [identity, label, *(rng.choice(column.values) for column in table.columns)]
        row += [rng.randint(1, N_PARENT_ROWS)] if table.key else []
        marks = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO {table.name} VALUES ({marks})", row)


def make_record(rng: Random) -> Fields:
    domain = rng.choice(DOMAINS)
    if rng.random() < 0.25:
        sql, *wordings = rng.choice(_JOINS)(rng, domain)
        schema = f"{domain.parent.ddl}; {domain.child.ddl}"
    else:
        table = domain.child if rng.random() < 0.65 else domain.parent
        (family,) = rng.choices(_FAMILIES, weights=_WEIGHTS)
        sql, *wordings = family(rng, table)
        schema = table.ddl
    question = generator.fill_pattern(rng, *wordings, **_WORDS)
    return {"question": question, "schema": schema, "sql": sql, "database": "database"}


def _simple(rng: Random, column: generator.Property, prefix: str = "") -> Pair:
    phrase, name = rng.choice(column.phrases), f"{prefix}{column.name}"
    if not column.is_number:
        value = rng.choice(column.values)
        if rng.random() < 0.15:
            return f"{phrase} other than '{value}'", f"{name} <> '{value}'"
        return f"{phrase} '{value}'", f"{name} = '{value}'"
    # Keep thresholds away from the ends, so that few conditions select nothing.
    last = len(column.values) - 1
    at = rng.randint(last // 6, last - last // 6)
    low = column.values[at]
    if rng.random() < 0.15:
        high = column.values[min(last, at + rng.randint(2, 6))]
        if at < last:
            words = rng.choice(("between {} and {}", "from {} to {}")).format(low, high)
            return f"{phrase} {words}", f"{name} BETWEEN {low} AND {high}"
    operator, compared = rng.choice(_COMPARE[:4] if int(column.values[-1]) > 12 else _COMPARE)
    return f"{phrase} {rng.choice(compared)} {low}", f"{name} {operator} {low}"


def _condition(rng: Random, table: Table, *, prefix: str = "", compound: float = 0.3) -> Pair:
    """Describe wanted rows: one condition, or two joined by and/or, without a leading "with"."""
    if rng.random() < 0.1:
        letter, column = rng.choice("ABCDEFGHIJLMNORST"), table.label
        words = rng.choice(("starting with", "that starts with", "beginning with"))
        sql = f"{prefix}{column.name} LIKE '{letter}%'"
        return f"{column.phrases[0]} {words} '{letter}'", sql
    if rng.random() >= compound:
        return _simple(rng, rng.choice(table.columns), prefix)
    first, second = rng.sample(table.columns, 2)
    (words_1, sql_1), (words_2, sql_2) = _simple(rng, first, prefix), _simple(rng, second, prefix)
    if rng.random() < 0.7:
        return f"{words_1} and {words_2}", f"{sql_1} AND {sql_2}"
    return f"{words_1} or {words_2}", f"{sql_1} OR {sql_2}"


def _any(words: tuple[str, ...]) -> str:
    """Return a placeholder for one of the words, drawn when the wording is filled."""
    return f"{{{'|'.join(words)}|}}"


def _ask_rows(rng: Random, table: Table) -> Ask:
    words, where = _condition(rng, table)
    columns = [rng.choice((table.label, *table.columns))]
    if rng.random() < 0.25:
        columns = rng.sample((table.label, *table.columns), 2)
    asked = " and ".join(rng.choice(column.phrases) for column in columns)
    noun = rng.choice(table.nouns)
    return (
        f"SELECT {', '.join(c.name for c in columns)} FROM {table.name} WHERE {where}",
        f"{{Show}} the {asked} of {noun} {{having}} {words}.",
        f"What is the {asked} of the {noun} {{having}} {words}?",
        f"For {noun} {{having}} {words}, {{show}} the {asked}.",
        f"I need the {asked} of all {noun} {{having}} {words}.",
    )


def _ask_count(rng: Random, table: Table) -> Ask:
    words, where = _condition(rng, table)
    noun, wording = rng.choice(table.nouns), rng.choice(_COUNT)
    counted = f"{noun} {{having}} {words}"
    return f"SELECT COUNT(*) FROM {table.name} WHERE {where}", wording.format(counted)


def _ask_aggregate(rng: Random, table: Table) -> Ask:
    column = rng.choice(table.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _condition(rng, table, compound=0.15)
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    noun = rng.choice(table.nouns)
    return (
        f"SELECT {function}({column.name}) FROM {table.name} WHERE {where}",
        f"What is the {asked} of {noun} {{having}} {words}?",
        f"{{Show}} the {asked} among {noun} {{having}} {words}.",
        f"Compute the {asked} for {noun} {{having}} {words}.",
    )


def _ask_groups(rng: Random, table: Table) -> Ask:
    by = rng.choice(table.texts)
    name, noun, clause = rng.choice(by.phrases), rng.choice(table.nouns), ""
    if rng.random() < 0.6:
        words, where = _simple(rng, rng.choice(table.numbers))
        noun, clause = f"{noun} {rng.choice(_HAVING)} {words}", f" WHERE {where}"
    value = "COUNT(*)"
    wordings = [f"How many {noun} are there for each {name}?", f"Count the {noun} per {name}."]
    if rng.random() >= 0.5:
        column = rng.choice(table.numbers)
        function, names = rng.choice(_AGGREGATES)
        asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
        value = f"{function}({column.name})"
        wordings = [
            f"For each {name}, what is the {asked} of {noun}?",
            f"{{Show}} the {asked} of {noun} by {name}.",
            f"Per {name}, {{show}} the {asked} of {noun}.",
        ]
    return f"SELECT {by.name}, {value} FROM {table.name}{clause} GROUP BY {by.name}", *wordings


def _ask_having(rng: Random, table: Table) -> Ask:
    by, least = rng.choice(table.texts), rng.randint(2, 30)
    noun, name = rng.choice(table.nouns), rng.choice(by.phrases)
    return (
        f"SELECT {by.name} FROM {table.name} GROUP BY {by.name} HAVING COUNT(*) > {least}",
        f"Which {name} has more than {least} {noun}?",
        f"{{Show}} every {name} with over {least} {noun}.",
    )


def _ask_top(rng: Random, table: Table) -> Ask:
    column = rng.choice(table.numbers)
    direction, names = rng.choice((("DESC", _AGGREGATES[1][1]), ("ASC", _AGGREGATES[2][1])))
    n_rows, asked = rng.randint(2, 12), rng.choice((table.label, *table.texts))
    noun, best = rng.choice(table.nouns), f"{rng.choice(names)} {rng.choice(column.phrases)}"
    # Ties by id; otherwise SQLite would choose which rows are within the limit.
    order = f"ORDER BY {column.name} {direction}, id LIMIT {n_rows}"
    return (
        f"SELECT {asked.name} FROM {table.name} {order}",
        f"{{Show}} the {_any(asked.phrases)} of the {n_rows} {noun} with the {best}.",
        f"Which {n_rows} {noun} have the {best}? Give the {_any(asked.phrases)}.",
    )


def _ask_sorted(rng: Random, table: Table) -> Ask:
    words, where = _condition(rng, table, compound=0.1)
    column = rng.choice(table.numbers)
    direction, names = rng.choice(_ORDERS)
    noun = f"{rng.choice(table.nouns)} {{having}} {words}"
    order = f"{{sorted|ordered}} by {_any(column.phrases)} in {_any(names)}"
    return (
        f"SELECT {table.label.name} FROM {table.name} WHERE {where}"
        f" ORDER BY {column.name} {direction}",
        f"{{Show}} the {_any(table.label.phrases)} of {noun}, {order}.",
    )


def _ask_distinct(rng: Random, table: Table) -> Ask:
    column = rng.choice(table.texts)
    words, where = _simple(rng, rng.choice(table.numbers))
    noun, name = rng.choice(table.nouns), rng.choice(column.phrases)
    return (
        f"SELECT DISTINCT {column.name} FROM {table.name} WHERE {where}",
        f"{{Show}} each different {name} of {noun} {{having}} {words}.",
        f"Which distinct {name} do {noun} {{having}} {words} have?",
    )


def _join_rows(rng: Random, domain: Domain) -> Ask:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    column = rng.choice((child.label, *child.columns))
    noun, owner, asked = rng.choice(child.nouns), rng.choice(parent.nouns), _any(column.phrases)
    return (
        f"SELECT {child.name}.{column.name} FROM {domain.join} WHERE {where}",
        f"{{Show}} the {asked} of {noun} that belong to {owner} {{having}} {words}.",
        f"What is the {asked} of {noun} of {owner} {{having}} {words}?",
    )


def _join_count(rng: Random, domain: Domain) -> Ask:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    counted = (
        f"{rng.choice(child.nouns)} of {rng.choice(parent.nouns)} {rng.choice(_HAVING)} {words}"
    )
    return f"SELECT COUNT(*) FROM {domain.join} WHERE {where}", rng.choice(_COUNT).format(counted)


def _join_groups(rng: Random, domain: Domain) -> Ask:
    parent, child = domain.parent, domain.child
    by, column = rng.choice(parent.texts), rng.choice(child.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _simple(rng, rng.choice(child.columns), f"{child.name}.")
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    noun, owner, group = _any(child.nouns), _any(parent.nouns), f"{parent.name}.{by.name}"
    return (
        f"SELECT {group}, {function}({child.name}.{column.name}) FROM {domain.join}"
        f" WHERE {where} GROUP BY {group}",
        f"For each {_any(by.phrases)} of the {owner}, {{show}} the {asked} of {noun} {{having}}"
        f" {words}.",
    )


_FAMILIES: tuple[Callable[[Random, Table], Ask], ...] = (
    *(_ask_rows, _ask_count, _ask_aggregate, _ask_groups),
    *(_ask_having, _ask_top, _ask_sorted, _ask_distinct),
)
_WEIGHTS = (8, 4, 4, 3, 1, 2, 2, 2)
_JOINS: tuple[Callable[[Random, Domain], Ask], ...] = (_join_rows, _join_count, _join_groups)
