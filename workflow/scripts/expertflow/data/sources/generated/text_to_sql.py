"""Make questions about ten pairs of tables, the SQL that answers them, and the tables' rows."""

import sqlite3
from pathlib import Path
from random import Random

from expertflow.core.files import replacing
from expertflow.data.sources.generated.sql_questions import make_record
from expertflow.data.sources.generated.sql_tables import DOMAINS, Column, Table
from expertflow.data.sources.generated.words import FAMILY_NAMES, GIVEN_NAMES, NOUNS
from expertflow.data.sources.generated.writing import unique_records, write_records

N_PARENT_ROWS = 24
N_CHILD_ROWS = 160
# SQLite notes the version of the library in bytes 96-99 of a database, for information only
# (https://www.sqlite.org/fileformat.html); a fixed one keeps the bytes equal on every machine.
SQLITE_VERSION_BYTES = (3_040_000).to_bytes(4, "big")


def generate(*, n_documents: int, seed: int, directory: Path) -> dict[str, Path]:
    """Write ``records.jsonl`` and ``database.sqlite``, in which every gold answer can be run."""
    database = directory / "database.sqlite"
    write_database(database, seed=seed)
    records = unique_records(make_record, n_documents=n_documents, seed=seed, key="question")
    write_records(directory, records)
    return {"database": database}


def write_database(path: Path, *, seed: int) -> None:
    """Write all tables into one SQLite file with equal bytes for equal seeds."""
    rng = Random(f"rows {seed}")
    with replacing(path) as partial:
        connection = sqlite3.connect(partial)
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
    for identity in range(1, n_rows + 1):
        row = [identity, _label(rng, table.label), *(_cell(rng, c) for c in table.columns)]
        row += [rng.randint(1, N_PARENT_ROWS)] if table.key else []
        marks = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO {table.name} VALUES ({marks})", row)


def _label(rng: Random, column: Column) -> str:
    second = FAMILY_NAMES if column.values is GIVEN_NAMES else NOUNS
    return f"{rng.choice(column.values)} {rng.choice(second)}"


def _cell(rng: Random, column: Column) -> str | int:
    if column.is_text:
        return rng.choice(column.values)
    return column.low + column.step * rng.randint(0, (column.high - column.low) // column.step)
