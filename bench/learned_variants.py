"""Vary WikiSQL questions, so that a small model has to read them and cannot memorize them.

A variant asks the same table about other columns and cells: a column's name or a cell
that occurs in the question exactly once is replaced there and in the query. The columns of the
schema are in another order. Each variant's query runs on its table.

    what was the average of player x?   SELECT "average" FROM t WHERE "player" = 'x'
    what was the innings of player y?   SELECT "innings" FROM t WHERE "player" = 'y'
"""

import random
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# The distinct values of a table's column.
Cells = Callable[[str, str], list[Any]]
_TABLE = re.compile(r"CREATE TABLE (\S+) \((.*)\)", re.DOTALL)
_COLUMN = re.compile(r'"([^"]+)" (TEXT|REAL)')
_QUERY = re.compile(r'SELECT (?:(\w+)\()?"([^"]+)"\)? FROM \S+(?: WHERE (.*))?', re.DOTALL)
_CONDITION = re.compile(r'"([^"]+)" (=|>|<) (\'(?:[^\']|\'\')*\'|-?[\d.]+)')


def variants(
    records: Iterable[Record], database: Path, *, n_each: int, seed: int
) -> Iterator[Record]:
    """Yield up to ``n_each`` different variants of each record; some records have none."""
    rng = random.Random(seed)
    with sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True) as connection:

        @cache
        def list_cells(table: str, column: str) -> list[Any]:
            rows = connection.execute(f'SELECT DISTINCT "{column}" FROM {table} ORDER BY 1')
            return [cell for (cell,) in rows if cell not in (None, "")]

        for record in records:
            seen = {record["question"].lower()}
            for _ in range(n_each):
                made = _vary(record, list_cells, rng)
                if made is not None and made["question"] not in seen:
                    connection.execute(made["sql"]).fetchmany(1)
                    seen.add(made["question"])
                    yield {**made, "id": f"{record['id']}-{len(seen) - 1}"}


def _vary(record: Record, list_cells: Cells, rng: random.Random) -> Record | None:
    table, query = _TABLE.fullmatch(record["schema"]), _QUERY.fullmatch(record["sql"])
    if table is None or query is None:
        return None
    columns = _COLUMN.findall(table[2])
    conditions = _CONDITION.findall(query[3] or "")
    question = record["question"].lower()
    used = [query[2], *(column for column, _, _ in conditions)]
    names = _exchange_columns(used, dict(columns), question, rng)
    if names is None:
        return None
    words = {old: new for old, new in names.items() if old != new}
    asked: list[str] = []
    for column, operator, value in conditions:
        cells = list_cells(table[1], names[column])
        said = _exchange_cell(column, value, cells, names, question, words, rng)
        if said is None:
            return None
        asked.append(f'"{names[column]}" {operator} {said}')
    if not words:
        return None
    column = f'"{names[query[2]]}"'
    sql = f"SELECT {f'{query[1]}({column})' if query[1] else column} FROM {table[1]}"
    sql += f" WHERE {' AND '.join(asked)}" if asked else ""
    rng.shuffle(columns)
    listed = ", ".join(f'"{name}" {kind}' for name, kind in columns)
    changed = _whole(*sorted(words, key=len, reverse=True)).sub(lambda m: words[m[0]], question)
    schema = f"CREATE TABLE {table[1]} ({listed})"
    return {**record, "schema": schema, "question": changed, "sql": sql}


def _exchange_columns(
    used: list[str], kinds: dict[str, str], question: str, rng: random.Random
) -> dict[str, str] | None:
    """Map each used column in the question to another one of its type, or to itself."""
    names: dict[str, str] = {}
    for column in used:
        if column in names or column not in kinds:
            continue
        others = [n for n, k in kinds.items() if k == kinds[column] and n not in names.values()]
        is_named = len(_whole(column).findall(question)) == 1
        names[column] = rng.choice(others) if is_named and others else column
    distinct = len(set(names.values())) == len(names) and set(used) <= set(names)
    return names if distinct else None


def _exchange_cell(
    column: str, value: str, cells: list[Any], names: dict[str, str], question: str,
    words: dict[str, str], rng: random.Random,
) -> str | None:  # fmt: skip
    """Replace a condition's value, also in ``words``; keep it if the question lacks it."""
    is_text = value.startswith("'")
    plain = (value[1:-1].replace("''", "'") if is_text else value).lower()
    found_once = len(_whole(plain).findall(question)) == 1 if plain else False
    if not (found_once and cells) or plain in words or plain in names:
        return value if names[column] == column else None
    cell = rng.choice(cells)
    shown = str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
    if is_text == isinstance(cell, int | float) or shown.lower() in (*words, *names):
        return None
    words[plain] = shown
    return "'" + shown.replace("'", "''") + "'" if is_text else shown


def _whole(*texts: str) -> re.Pattern[str]:
    """Find texts at word boundaries."""
    return re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in texts))
