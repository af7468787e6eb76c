"""Generate questions about ten pairs of tables, the SQL that answers them, and the rows."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

from expertflow.core.files import replacing
from expertflow.data.records import Fields
from expertflow.data.sources.generated.generator import (
    FAMILY_NAMES,
    GIVEN_NAMES,
    NOUNS,
    Property,
    fill_pattern,
    unique_records,
    write_records,
)
from expertflow.data.sources.generated.sql_tables import DOMAINS, Domain, Table

N_PARENT_ROWS = 24
N_CHILD_ROWS = 160
# SQLite writes its version to bytes 96-99 of a database, for information only
# (https://www.sqlite.org/fileformat.html); a fixed one keeps files equal on every machine.
SQLITE_VERSION_BYTES = (3_040_000).to_bytes(4, "big")

_SHOW = ("List", "Show", "Find", "Give me", "Return", "Display", "Get")
_SHOW_NOW = tuple(word.lower() for word in _SHOW)
_HAVING = ("with", "that have", "having")
_COUNT = (
    "How many {} are there",
    "Count the {}",
    "What is the number of {}",
    "Tell me how many {} exist",
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

# A question or part of one, and its SQL.
Pair = tuple[str, str]


def generate(*, n_documents: int, seed: int, directory: Path) -> dict[str, Path]:
    """Write ``records.jsonl`` and ``database.sqlite``, on which all gold answers run."""
    database = directory / "database.sqlite"
    write_database(database, seed=seed)
    records = unique_records(make_record, n_documents=n_documents, seed=seed, key="question")
    write_records(directory, records)
    return {"database": database}


def write_database(path: Path, *, seed: int) -> None:
    """Write all tables to a SQLite file; equal seeds give equal bytes."""
    rng = Random(f"rows {seed}")
    with replacing(path) as partial:
        connection = sqlite3.connect(partial)
        # SQLite's defaults vary by how it was built; the file's hash must not.
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA encoding = 'UTF-8'")
        for domain in DOMAINS:
            _fill(connection, domain.parent, n_rows=N_PARENT_ROWS, rng=rng)
            _fill(connection, domain.child, n_rows=N_CHILD_ROWS, rng=rng)
        connection.commit()
        connection.close()
        with partial.open("r+b") as stream:
            stream.seek(96)
            stream.write(SQLITE_VERSION_BYTES)


def _fill(connection: sqlite3.Connection, table: Table, *, n_rows: int, rng: Random) -> None:
    connection.execute(table.ddl)
    seconds = FAMILY_NAMES if table.label.values is GIVEN_NAMES else NOUNS
    for identity in range(1, n_rows + 1):
        label = f"{rng.choice(table.label.values)} {rng.choice(seconds)}"
        row = [identity, label, *(rng.choice(column.values) for column in table.columns)]
        row += [rng.randint(1, N_PARENT_ROWS)] if table.key else []
        marks = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO {table.name} VALUES ({marks})", row)


def make_record(rng: Random) -> Fields:
    domain = rng.choice(DOMAINS)
    if rng.random() < 0.25:
        question, sql = rng.choice(_JOINS)(rng, domain)
        schema = f"{domain.parent.ddl}; {domain.child.ddl}"
    else:
        table = domain.child if rng.random() < 0.65 else domain.parent
        (family,) = rng.choices(_FAMILIES, weights=_WEIGHTS)
        question, sql = family(rng, table)
        schema = table.ddl
    return {"question": question, "schema": schema, "sql": sql, "database": "database"}


def _simple(rng: Random, column: Property, prefix: str = "") -> Pair:
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


def _fill_words(rng: Random, *patterns: str, **words: tuple[str, ...]) -> str:
    return fill_pattern(rng, *patterns, Show=_SHOW, show=_SHOW_NOW, having=_HAVING, **words)


def _ask_rows(rng: Random, table: Table) -> Pair:
    words, where = _condition(rng, table)
    columns = [rng.choice((table.label, *table.columns))]
    if rng.random() < 0.25:
        columns = rng.sample((table.label, *table.columns), 2)
    asked = " and ".join(rng.choice(column.phrases) for column in columns)
    noun = rng.choice(table.nouns)
    question = _fill_words(
        rng,
        f"{{Show}} the {asked} of {noun} {{having}} {words}.",
        f"What is the {asked} of the {noun} {{having}} {words}?",
        f"For {noun} {{having}} {words}, {{show}} the {asked}.",
        f"I need the {asked} of all {noun} {{having}} {words}.",
    )
    return question, f"SELECT {', '.join(c.name for c in columns)} FROM {table.name} WHERE {where}"


def _ask_count(rng: Random, table: Table) -> Pair:
    words, where = _condition(rng, table)
    noun, pattern = rng.choice(table.nouns), rng.choice(_COUNT)
    question = _fill_words(rng, pattern.format(f"{noun} {{having}} {words}"))
    return f"{question}?", f"SELECT COUNT(*) FROM {table.name} WHERE {where}"


def _ask_aggregate(rng: Random, table: Table) -> Pair:
    column = rng.choice(table.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _condition(rng, table, compound=0.15)
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    noun = rng.choice(table.nouns)
    question = _fill_words(
        rng,
        f"What is the {asked} of {noun} {{having}} {words}?",
        f"{{Show}} the {asked} among {noun} {{having}} {words}.",
        f"Compute the {asked} for {noun} {{having}} {words}.",
    )
    return question, f"SELECT {function}({column.name}) FROM {table.name} WHERE {where}"


def _ask_groups(rng: Random, table: Table) -> Pair:
    by = rng.choice(table.texts)
    name, noun, clause = rng.choice(by.phrases), rng.choice(table.nouns), ""
    if rng.random() < 0.6:
        words, where = _simple(rng, rng.choice(table.numbers))
        noun, clause = _fill_words(rng, f"{noun} {{having}} {words}"), f" WHERE {where}"
    value = "COUNT(*)"
    patterns = [f"How many {noun} are there for each {name}?", f"Count the {noun} per {name}."]
    if rng.random() >= 0.5:
        column = rng.choice(table.numbers)
        function, names = rng.choice(_AGGREGATES)
        asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
        value = f"{function}({column.name})"
        patterns = [
            f"For each {name}, what is the {asked} of {noun}?",
            f"{{Show}} the {asked} of {noun} by {name}.",
            f"Per {name}, {{show}} the {asked} of {noun}.",
        ]
    sql = f"SELECT {by.name}, {value} FROM {table.name}{clause} GROUP BY {by.name}"
    return _fill_words(rng, *patterns), sql


def _ask_having(rng: Random, table: Table) -> Pair:
    by, least = rng.choice(table.texts), rng.randint(2, 30)
    noun, name = rng.choice(table.nouns), rng.choice(by.phrases)
    question = _fill_words(
        rng,
        f"Which {name} has more than {least} {noun}?",
        f"{{Show}} every {name} with over {least} {noun}.",
    )
    having = f"GROUP BY {by.name} HAVING COUNT(*) > {least}"
    return question, f"SELECT {by.name} FROM {table.name} {having}"


def _ask_top(rng: Random, table: Table) -> Pair:
    column = rng.choice(table.numbers)
    direction, names = rng.choice((("DESC", _AGGREGATES[1][1]), ("ASC", _AGGREGATES[2][1])))
    n_rows, asked = rng.randint(2, 12), rng.choice((table.label, *table.texts))
    noun, best = rng.choice(table.nouns), f"{rng.choice(names)} {rng.choice(column.phrases)}"
    question = _fill_words(
        rng,
        f"{{Show}} the {{asked}} of the {n_rows} {noun} with the {best}.",
        f"Which {n_rows} {noun} have the {best}? Give the {{asked}}.",
        asked=asked.phrases,
    )
    # By id among equals, else which rows are within the limit would be left to SQLite.
    order = f"ORDER BY {column.name} {direction}, id LIMIT {n_rows}"
    return question, f"SELECT {asked.name} FROM {table.name} {order}"


def _ask_sorted(rng: Random, table: Table) -> Pair:
    words, where = _condition(rng, table, compound=0.1)
    column = rng.choice(table.numbers)
    direction, names = rng.choice(_ORDERS)
    noun = f"{rng.choice(table.nouns)} {{having}} {words}"
    question = _fill_words(
        rng,
        f"{{Show}} the {{label}} of {noun}, {{sorted|ordered}} by {{name}} in {{order}}.",
        label=table.label.phrases,
        name=column.phrases,
        order=names,
    )
    order = f"ORDER BY {column.name} {direction}"
    return question, f"SELECT {table.label.name} FROM {table.name} WHERE {where} {order}"


def _ask_distinct(rng: Random, table: Table) -> Pair:
    column = rng.choice(table.texts)
    words, where = _simple(rng, rng.choice(table.numbers))
    noun, name = rng.choice(table.nouns), rng.choice(column.phrases)
    question = _fill_words(
        rng,
        f"{{Show}} each different {name} of {noun} {{having}} {words}.",
        f"Which distinct {name} do {noun} {{having}} {words} have?",
    )
    return question, f"SELECT DISTINCT {column.name} FROM {table.name} WHERE {where}"


def _join_rows(rng: Random, domain: Domain) -> Pair:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    asked = rng.choice((child.label, *child.columns))
    noun, owner = rng.choice(child.nouns), rng.choice(parent.nouns)
    question = _fill_words(
        rng,
        f"{{Show}} the {{asked}} of {noun} that belong to {owner} {{having}} {words}.",
        f"What is the {{asked}} of {noun} of {owner} {{having}} {words}?",
        asked=asked.phrases,
    )
    return question, f"SELECT {child.name}.{asked.name} FROM {domain.join} WHERE {where}"


def _join_count(rng: Random, domain: Domain) -> Pair:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    pattern = f"{{noun}} of {{owner}} {{having}} {words}"
    noun = _fill_words(rng, pattern, noun=child.nouns, owner=parent.nouns)
    question = rng.choice(_COUNT).format(noun)
    return f"{question}?", f"SELECT COUNT(*) FROM {domain.join} WHERE {where}"


def _join_groups(rng: Random, domain: Domain) -> Pair:
    parent, child = domain.parent, domain.child
    by, column = rng.choice(parent.texts), rng.choice(child.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _simple(rng, rng.choice(child.columns), f"{child.name}.")
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    pattern = (
        f"For each {{name}} of the {{owner}}, {{show}} the {asked} of {{noun}} {{having}} {words}."
    )
    question = _fill_words(rng, pattern, name=by.phrases, owner=parent.nouns, noun=child.nouns)
    select = f"{parent.name}.{by.name}, {function}({child.name}.{column.name})"
    return (
        question,
        f"SELECT {select} FROM {domain.join} WHERE {where} GROUP BY {parent.name}.{by.name}",
    )


_FAMILIES: tuple[Callable[[Random, Table], Pair], ...] = (
    *(_ask_rows, _ask_count, _ask_aggregate, _ask_groups),
    *(_ask_having, _ask_top, _ask_sorted, _ask_distinct),
)
_WEIGHTS = (8, 4, 4, 3, 1, 2, 2, 2)
_JOINS: tuple[Callable[[Random, Domain], Pair], ...] = (_join_rows, _join_count, _join_groups)
