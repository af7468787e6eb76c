"""Ask about tables in many wordings, and say the same in SQL: pure functions of a generator."""

from collections.abc import Callable
from random import Random

from expertflow.data.sources.generated.sql_tables import DOMAINS, Column, Domain, Table
from expertflow.data.sources.generated.writing import Record

_SHOW = ("List", "Show", "Find", "Give me", "Return", "Display", "Get")
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

Condition = tuple[str, str]
Question = tuple[str, str]


def make_record(rng: Random) -> Record:
    """Ask one question about one table, or about two that are joined."""
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


def _value(rng: Random, column: Column) -> int:
    """Pick a threshold away from the ends, so that few conditions select nothing."""
    n_steps = (column.high - column.low) // column.step
    margin = n_steps // 6
    return column.low + column.step * rng.randint(margin, n_steps - margin)


def _simple(rng: Random, column: Column, prefix: str) -> Condition:
    phrase = rng.choice(column.phrases)
    if column.is_text:
        value = rng.choice(column.values)
        if rng.random() < 0.15:
            return f"{phrase} other than '{value}'", f"{prefix}{column.name} <> '{value}'"
        return f"{phrase} '{value}'", f"{prefix}{column.name} = '{value}'"
    value_1 = _value(rng, column)
    if rng.random() < 0.15:
        value_2 = min(column.high, value_1 + column.step * rng.randint(2, 6))
        if value_2 > value_1:
            text = rng.choice(("between {} and {}", "from {} to {}")).format(value_1, value_2)
            return f"{phrase} {text}", f"{prefix}{column.name} BETWEEN {value_1} AND {value_2}"
    operator, words = rng.choice(_COMPARE[:4] if column.high > 12 else _COMPARE)
    return f"{phrase} {rng.choice(words)} {value_1}", f"{prefix}{column.name} {operator} {value_1}"


def _like(rng: Random, column: Column, prefix: str) -> Condition:
    letter = rng.choice("ABCDEFGHIJLMNORST")
    words = rng.choice(("starting with", "that starts with", "beginning with"))
    return f"{column.phrases[0]} {words} '{letter}'", f"{prefix}{column.name} LIKE '{letter}%'"


def _condition(rng: Random, table: Table, *, prefix: str = "", compound: float = 0.3) -> Condition:
    """Say what rows are wanted: one condition, or two joined by and/or. No leading "with"."""
    if rng.random() < 0.1:
        return _like(rng, table.label, prefix)
    if rng.random() >= compound:
        return _simple(rng, rng.choice(table.columns), prefix)
    first, second = rng.sample(table.columns, 2)
    (words_1, sql_1), (words_2, sql_2) = _simple(rng, first, prefix), _simple(rng, second, prefix)
    if rng.random() < 0.7:
        return f"{words_1} and {words_2}", f"{sql_1} AND {sql_2}"
    return f"{words_1} or {words_2}", f"{sql_1} OR {sql_2}"


def _with(rng: Random, words: str) -> str:
    return f"{rng.choice(('with', 'that have', 'having'))} {words}"


def _noun(rng: Random, table: Table) -> str:
    return rng.choice(table.nouns)


def _ask_rows(rng: Random, table: Table) -> Question:
    words, where = _condition(rng, table)
    columns = [rng.choice((table.label, *table.columns))]
    if rng.random() < 0.25:
        columns = rng.sample((table.label, *table.columns), 2)
    asked = " and ".join(rng.choice(c.phrases) for c in columns)
    noun = _noun(rng, table)
    question = rng.choice(
        (
            f"{rng.choice(_SHOW)} the {asked} of {noun} {_with(rng, words)}.",
            f"What is the {asked} of the {noun} {_with(rng, words)}?",
            f"For {noun} {_with(rng, words)}, {rng.choice(_SHOW).lower()} the {asked}.",
            f"I need the {asked} of all {noun} {_with(rng, words)}.",
        )
    )
    return question, f"SELECT {', '.join(c.name for c in columns)} FROM {table.name} WHERE {where}"


def _ask_count(rng: Random, table: Table) -> Question:
    words, where = _condition(rng, table)
    noun = _noun(rng, table)
    question = rng.choice(_COUNT).format(f"{noun} {_with(rng, words)}")
    return f"{question}?", f"SELECT COUNT(*) FROM {table.name} WHERE {where}"


def _ask_aggregate(rng: Random, table: Table) -> Question:
    column = rng.choice(table.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _condition(rng, table, compound=0.15)
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    noun = _noun(rng, table)
    question = rng.choice(
        (
            f"What is the {asked} of {noun} {_with(rng, words)}?",
            f"{rng.choice(_SHOW)} the {asked} among {noun} {_with(rng, words)}.",
            f"Compute the {asked} for {noun} {_with(rng, words)}.",
        )
    )
    return question, f"SELECT {function}({column.name}) FROM {table.name} WHERE {where}"


def _ask_groups(rng: Random, table: Table) -> Question:
    by = rng.choice(table.texts)
    name = rng.choice(by.phrases)
    noun = _noun(rng, table)
    filtered = rng.random() < 0.6
    words, where = _simple(rng, rng.choice(table.numbers), "") if filtered else ("", "")
    noun = f"{noun} {_with(rng, words)}" if filtered else noun
    clause = f" WHERE {where}" if filtered else ""
    if rng.random() < 0.5:
        asked, value = "number of", "COUNT(*)"
        question = rng.choice(
            (f"How many {noun} are there for each {name}?", f"Count the {noun} per {name}.")
        )
    else:
        column = rng.choice(table.numbers)
        function, names = rng.choice(_AGGREGATES)
        asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
        value = f"{function}({column.name})"
        question = rng.choice(
            (
                f"For each {name}, what is the {asked} of {noun}?",
                f"{rng.choice(_SHOW)} the {asked} of {noun} by {name}.",
                f"Per {name}, {rng.choice(_SHOW).lower()} the {asked} of {noun}.",
            )
        )
    return question, f"SELECT {by.name}, {value} FROM {table.name}{clause} GROUP BY {by.name}"


def _ask_having(rng: Random, table: Table) -> Question:
    by = rng.choice(table.texts)
    least = rng.randint(2, 30)
    noun, name = _noun(rng, table), rng.choice(by.phrases)
    question = rng.choice(
        (
            f"Which {name} has more than {least} {noun}?",
            f"{rng.choice(_SHOW)} every {name} with over {least} {noun}.",
        )
    )
    having = f"GROUP BY {by.name} HAVING COUNT(*) > {least}"
    return question, f"SELECT {by.name} FROM {table.name} {having}"


def _ask_top(rng: Random, table: Table) -> Question:
    column = rng.choice(table.numbers)
    direction, names = rng.choice((("DESC", _AGGREGATES[1][1]), ("ASC", _AGGREGATES[2][1])))
    n_rows = rng.randint(2, 12)
    asked = rng.choice((table.label, *table.texts))
    noun = _noun(rng, table)
    superlative = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    question = rng.choice(
        (
            f"{rng.choice(_SHOW)} the {rng.choice(asked.phrases)} of the {n_rows} {noun} "
            f"with the {superlative}.",
            f"Which {n_rows} {noun} have the {superlative}? Give the {rng.choice(asked.phrases)}.",
        )
    )
    order = f"ORDER BY {column.name} {direction}, id LIMIT {n_rows}"
    return question, f"SELECT {asked.name} FROM {table.name} {order}"


def _ask_sorted(rng: Random, table: Table) -> Question:
    words, where = _condition(rng, table, compound=0.1)
    column = rng.choice(table.numbers)
    direction, names = rng.choice(_ORDERS)
    noun = _noun(rng, table)
    question = (
        f"{rng.choice(_SHOW)} the {rng.choice(table.label.phrases)} of {noun} {_with(rng, words)}, "
        f"{rng.choice(('sorted', 'ordered'))} by {rng.choice(column.phrases)} "
        f"in {rng.choice(names)}."
    )
    order = f"ORDER BY {column.name} {direction}"
    return question, f"SELECT {table.label.name} FROM {table.name} WHERE {where} {order}"


def _ask_distinct(rng: Random, table: Table) -> Question:
    column = rng.choice(table.texts)
    words, where = _simple(rng, rng.choice(table.numbers), "")
    noun, name = _noun(rng, table), rng.choice(column.phrases)
    question = rng.choice(
        (
            f"{rng.choice(_SHOW)} each different {name} of {noun} {_with(rng, words)}.",
            f"Which distinct {name} do {noun} {_with(rng, words)} have?",
        )
    )
    return question, f"SELECT DISTINCT {column.name} FROM {table.name} WHERE {where}"


def _join(domain: Domain) -> str:
    parent, child = domain.parent.name, domain.child.name
    return f"{child} JOIN {parent} ON {child}.{domain.child.key} = {parent}.id"


def _join_rows(rng: Random, domain: Domain) -> Question:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    asked = rng.choice((child.label, *child.columns))
    noun, owner = _noun(rng, child), _noun(rng, parent)
    question = rng.choice(
        (
            f"{rng.choice(_SHOW)} the {rng.choice(asked.phrases)} of {noun} that belong to {owner} "
            f"{_with(rng, words)}.",
            f"What is the {rng.choice(asked.phrases)} of {noun} of {owner} {_with(rng, words)}?",
        )
    )
    return question, f"SELECT {child.name}.{asked.name} FROM {_join(domain)} WHERE {where}"


def _join_count(rng: Random, domain: Domain) -> Question:
    parent, child = domain.parent, domain.child
    words, where = _condition(rng, parent, prefix=f"{parent.name}.", compound=0.1)
    noun = f"{_noun(rng, child)} of {_noun(rng, parent)} {_with(rng, words)}"
    question = rng.choice(_COUNT).format(noun)
    return f"{question}?", f"SELECT COUNT(*) FROM {_join(domain)} WHERE {where}"


def _join_groups(rng: Random, domain: Domain) -> Question:
    parent, child = domain.parent, domain.child
    by, column = rng.choice(parent.texts), rng.choice(child.numbers)
    function, names = rng.choice(_AGGREGATES)
    words, where = _simple(rng, rng.choice(child.columns), f"{child.name}.")
    asked = f"{rng.choice(names)} {rng.choice(column.phrases)}"
    question = (
        f"For each {rng.choice(by.phrases)} of the {_noun(rng, parent)}, "
        f"{rng.choice(_SHOW).lower()} the {asked} of {_noun(rng, child)} {_with(rng, words)}."
    )
    select = f"{parent.name}.{by.name}, {function}({child.name}.{column.name})"
    group = f"GROUP BY {parent.name}.{by.name}"
    return question, f"SELECT {select} FROM {_join(domain)} WHERE {where} {group}"


_FAMILIES: tuple[Callable[[Random, Table], Question], ...] = (
    _ask_rows,
    _ask_count,
    _ask_aggregate,
    _ask_groups,
    _ask_having,
    _ask_top,
    _ask_sorted,
    _ask_distinct,
)
_WEIGHTS = (8, 4, 4, 3, 1, 2, 2, 2)
_JOINS: tuple[Callable[[Random, Domain], Question], ...] = (_join_rows, _join_count, _join_groups)
