"""Code shared by the workers for SQL and graphs; imports only the standard library."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

# Above the rounding of sums in another order (1e-15 to 1e-12), below a cent in millions of dollars
# and minutes of Julian days. Spider's test suites compare exactly: a sum in another order is wrong.
RELATIVE_TOLERANCE = 1e-9
# Residue of canceling terms, infinite relative to a true result of zero.
ABSOLUTE_TOLERANCE = 1e-9
# The first is SQLite's own; shells and some distributions add the others.
REFUSED_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
NO_TEXT = re.compile("[\0\ud800-\udfff]")

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    kind: str
    detail: str = ""
    n_columns: int = 0
    rows: tuple[Row, ...] = ()


def one_line(message: object) -> str:
    # A program's error, or a JSON key, may contain lone surrogates, which no report can.
    return NO_TEXT.sub("?", " ".join(str(message).split())[:200])


def same_rows(left: Sequence[Row], right: Sequence[Row], *, ordered: bool) -> bool:
    """Compare rows, as a multiset unless ``ordered``, with tolerance for fractional numbers.

    >>> same_rows([(0.1 + 0.2, "b"), (1, "a")], [(1.0, "a"), (0.3, "b")], ordered=False)
    True
    """
    if len(left) != len(right):
        return False
    if not ordered:
        rank = _ranks(chain(left, right))
        left, right = sorted(left, key=rank), sorted(right, key=rank)
    return all(
        len(a) == len(b) and all(map(_same_cell, a, b)) for a, b in zip(left, right, strict=True)
    )


def _ranks(rows: Iterable[Row]) -> Callable[[Row], tuple[Any, ...]]:
    """Rank all values, close ones alike, so that sorting ignores rounding.

    Sorting by value fails: of (0.30000000000000004, 1) and (0.3, 2) the noise in the first column
    would decide, and differently on the other side.
    """
    rank: dict[tuple[str, Any], int] = {}
    last: Any = None
    for key in sorted({_key(value) for row in rows for value in row}):
        # 0.3, 0.30000000000000004 and 1: ranks 0, 0, 2
        rank[key] = rank[last] if last and _same_cell(last[1], key[1]) else len(rank)
        last = key

    def sort_key(row: Row) -> tuple[Any, ...]:
        keys = [_key(value) for value in row]
        return [rank[key] for key in keys], keys

    return sort_key


def _key(value: Any) -> tuple[str, Any]:
    return ("" if isinstance(value, int | float) else type(value).__name__), value


def _same_cell(left: Any, right: Any) -> bool:
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return type(left) is type(right) and bool(left == right)
    # Counts and keys are exact, however large; a sum of money may be integral on one side.
    if float(left).is_integer() and float(right).is_integer():
        return left == right
    return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
