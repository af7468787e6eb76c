"""Measure with mutants how well ``sql_execution`` tells wrong queries from right ones.

    python bench/sql_judge.py [--references 100] [--states 1000] [--seed 0]

References of two real data sets, with their schemas as text, are each changed in one place: an
operator, a constant, a column, a join, DISTINCT, an aggregate, the order, a limit. A mutant counts
as different if one of ``--states`` databases tells it apart; this file's generator makes them
and shares nothing with the judge's. ``caught`` is the share of those that the judge calls
wrong. Prints a table; the last line is JSON.
"""

import argparse
import json
import random
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp

sys.path.append(str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.evaluate.isolation.rows import same_rows
from expertflow.evaluate.isolation.sql_suite import Suite, UnusableError
from expertflow.evaluate.isolation.sql_worker import Limits, is_ordered

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "expert-sql"
LIMITS = Limits()
OPERATORS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
AGGREGATES = (exp.Sum, exp.Avg, exp.Min, exp.Max)
N_ROWS = 12


def read_records(n: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield data set, schema and reference."""
    schemas = json.loads((DATA / "defog" / "schemas.json").read_text())
    for name in ("defog", "wikisql"):
        lines = (DATA / name / "records.jsonl").read_text().splitlines()
        for line in random.Random(seed).sample(lines, n):
            record = json.loads(line)
            schema = record.get("schema") or ";".join(schemas[record["db_name"]])
            yield name, schema, record["sql"]


def mutate(query: str, columns: list[str]) -> Iterator[tuple[str, str]]:
    """Yield queries changed in one place, each with the kind of change."""
    tree = sqlglot.parse_one(query, read="sqlite")
    for number, node in enumerate(tree.walk()):
        for kind, other in changes(node, columns):
            copy = tree.copy()
            place = next(found for i, found in enumerate(copy.walk()) if i == number)
            if other is None:
                place.pop()
            elif place.parent is None:
                copy = other
            else:
                place.replace(other)
            text = copy.sql(dialect="sqlite")
            if text != tree.sql(dialect="sqlite"):
                yield kind, text


def changes(node: Any, columns: list[str]) -> Iterator[tuple[str, Any]]:
    if type(node) in OPERATORS:
        turn = OPERATORS[(OPERATORS.index(type(node)) + 1) % len(OPERATORS)]
        yield "operator", turn(this=node.this.copy(), expression=node.expression.copy())
    if isinstance(node, exp.And):
        yield "operator", exp.Or(this=node.this.copy(), expression=node.expression.copy())
    if isinstance(node, exp.Literal):
        in_limit = isinstance(node.parent, exp.Limit | exp.Offset)
        other = f"{node.name}x" if node.is_string else str(float(node.name) + 1).removesuffix(".0")
        yield "limit" if in_limit else "constant", exp.Literal(this=other, is_string=node.is_string)
    if isinstance(node, exp.Column) and node.name in columns:
        near = columns[(columns.index(node.name) + 1) % len(columns)]
        yield "column", exp.column(near, table=node.args.get("table"), quoted=True)
    if isinstance(node, AGGREGATES):
        turn = AGGREGATES[(AGGREGATES.index(type(node)) + 1) % len(AGGREGATES)]
        yield "aggregate", turn(this=node.this.copy())
    if isinstance(node, exp.Join) and not node.args.get("side") and node.args.get("on"):
        left = node.copy()
        left.set("side", "LEFT")
        yield "join", left
    if isinstance(node, exp.Distinct) and isinstance(node.parent, exp.Select):
        yield "distinct", None
    if isinstance(node, exp.Select) and not node.args.get("distinct"):
        yield "distinct", node.copy().distinct()
    if isinstance(node, exp.Ordered):
        turned = node.copy()
        turned.set("desc", not node.args.get("desc"))
        yield "order", turned


def make_states(schema: str, query: str, n: int, seed: int) -> Iterator[sqlite3.Connection]:
    """Yield databases with values drawn from the query's own literals and a few others."""
    literals = [found.name for found in sqlglot.parse_one(query).find_all(exp.Literal)]
    texts = [text.replace("%", "") for text in literals] + ["red", "green", "Blue", "2021-03-04"]
    numbers = [float(t) for t in literals if t.replace(".", "", 1).isdigit()] + [0.0, 1.0, 2.0, 7.5]
    for number in range(n):
        rng = random.Random(f"{seed} {number}")
        connection = sqlite3.connect(":memory:")
        connection.executescript(schema)
        named = "SELECT name, type FROM pragma_table_info(?)"
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            if table.lower() not in query.lower():
                continue
            columns = connection.execute(named, (table,)).fetchall()
            for _ in range(rng.randint(1, N_ROWS)):
                row = [draw(rng, name, declared, texts, numbers) for name, declared in columns]
                marks = ", ".join("?" * len(row))
                connection.execute(f'INSERT OR IGNORE INTO "{table}" VALUES ({marks})', row)
        yield connection


def draw(
    rng: random.Random, name: str, declared: str, texts: list[str], numbers: list[float]
) -> Any:
    if rng.random() < 0.05:
        return None
    if name.lower().endswith("id"):
        return rng.randint(1, 6)
    if any(
        word in declared.upper() for word in ("INT", "REAL", "NUM", "DEC", "FLO", "DOUB", "BOOL")
    ):
        value = rng.choice(numbers) + rng.choice((0, 0, 1, -1))
        return int(value) if "INT" in declared.upper() or value.is_integer() else value
    text = rng.choice(texts)
    return text + rng.choice(("", "", "", "x"))


def answer(connection: sqlite3.Connection, query: str) -> list[Any] | str:
    try:
        return connection.execute(query).fetchmany(10_000)
    except sqlite3.Error:
        return "failed"


def differing(schema: str, reference: str, mutants: list[str], n: int, seed: int) -> set[str]:
    """Return the mutants that a database of the independent generator tells apart."""
    left, ordered = set(mutants), is_ordered(reference)
    for connection in make_states(schema, reference, n, seed):
        wanted = answer(connection, reference)
        connection.execute("PRAGMA reverse_unordered_selects = ON")
        again = answer(connection, reference)
        connection.execute("PRAGMA reverse_unordered_selects = OFF")
        if isinstance(wanted, str) or isinstance(again, str):
            continue
        # With ties, another order would be as right.
        if same_rows(wanted, again, ordered=ordered):
            for mutant in list(left):
                found = answer(connection, mutant)
                if isinstance(found, str) or not same_rows(found, wanted, ordered=ordered):
                    left.discard(mutant)
        connection.close()
    return set(mutants) - left


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--references", type=int, default=100, help="of each data set")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--mutants", type=int, default=12, help="at most, of each reference")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not DATA.is_dir():
        print("skipped: no data in ../shared/data/expert-sql")
        print(json.dumps({"reason": "no data"}))
        return
    different: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    missed, unusable, failed, seconds, n = [], [], 0, [], 0
    for name, schema, reference in read_records(args.references, args.seed):
        n += 1
        began_s = time.process_time()
        try:
            suite = Suite(schema, reference, LIMITS)
        except UnusableError as error:
            unusable.append(f"{error}: {reference}")
            continue
        failed += suite.judge(reference)[0] != "correct"
        seconds.append(time.process_time() - began_s)
        with sqlite3.connect(":memory:") as layout:
            layout.executescript(schema)
            query = "SELECT DISTINCT p.name FROM sqlite_master, pragma_table_info(tbl_name) AS p"
            columns = [column for (column,) in layout.execute(query)]
        made = list(dict.fromkeys(mutate(reference, columns)))
        chosen = random.Random(args.seed).sample(made, min(args.mutants, len(made)))
        kinds = {text: kind for kind, text in chosen}
        for text in differing(schema, reference, list(kinds), args.states, args.seed):
            is_caught = suite.judge(text)[0] != "correct"
            for kind in (kinds[text], "all"):
                different[name, kind] += 1
                caught[name, kind] += is_caught
            if not is_caught:
                missed.append((kinds[text], reference, text))
        suite.close()
    print(f"{'data':10}{'change':12}{'different':>10}{'caught':>8}{'share':>8}")
    for key in sorted(different):
        share = caught[key] / different[key]
        print(f"{key[0]:10}{key[1]:12}{different[key]:>10}{caught[key]:>8}{share:>8.1%}")
    for kind, reference, text in missed:
        print(f"missed {kind}:\n  {reference}\n  {text}")
    for text in unusable:
        print(f"unusable: {text}")
    everything = sum(v for (_, kind), v in different.items() if kind == "all")
    all_caught = sum(v for (_, kind), v in caught.items() if kind == "all")
    result = {"references": n, "unusable": len(unusable), "references_that_fail_themselves": failed}
    result |= {"mutants_different": everything, "caught_fraction": all_caught / max(everything, 1)}
    result |= {"ms_per_question": 1000 * sum(seconds) / max(len(seconds), 1)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
