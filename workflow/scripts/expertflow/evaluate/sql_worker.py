"""Run untrusted SQL; started by ``sql`` as a process of its own, never imported for running.

A query sees one SQLite database, opened read-only and immutable. An authorizer refuses everything
but SELECT, extensions stay off, files cannot be written, and a budget of instructions, rows, bytes,
memory and processor time ends what runs too long. Only the standard library is imported, so that
the process starts in a blink and holds nothing worth reaching.
"""

import json
import math
import re
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Wider than a sum's rounding in another order (1e-15), narrower than a cent in a thousand dollars.
RELATIVE_TOLERANCE = 1e-6
# What is left of terms that cancel; relative to a true result of zero it would be infinite.
ABSOLUTE_TOLERANCE = 1e-9

_TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))
      | '[^']*' | "[^"]*" | `[^`]*` | \[[^\[\]]*\]
      | (?P<word>[^\W\d]\w*)
      | .""",
    re.VERBOSE | re.DOTALL,
)
_COMMANDS = """
    ALTER ANALYZE ATTACH BEGIN COMMIT CREATE DELETE DETACH DROP END EXPLAIN INSERT PRAGMA REINDEX
    RELEASE REPLACE ROLLBACK SAVEPOINT UPDATE VACUUM
"""
_OTHER_COMMANDS = frozenset(_COMMANDS.split())
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# SQLite itself has the first; shells and some distributions build in the others.
_REFUSED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_INSTRUCTIONS_PER_CHECK = 10_000

Row = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one query may use. SQLite runs some 1e8 instructions a second on a slow core."""

    n_instructions: int = 500_000_000
    n_rows: int = 10_000
    n_query_chars: int = 100_000
    cell_bytes: int = 10_000_000
    result_bytes: int = 32_000_000
    memory_bytes: int = 1 << 30
    cpu_s: int = 30
    # Kept by the other side, against what no limit here sees: a disk that hangs, say.
    wall_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a query came to: kind ``rows``, or the kind of failure."""

    kind: str
    detail: str = ""
    n_columns: int = 0
    rows: tuple[Row, ...] = ()


def run_query(query: str, database: Path, limits: Limits) -> Answer:
    """Run one SELECT and return its rows; everything else that a text can do ends in a kind."""
    if len(query) > limits.n_query_chars:
        return Answer(kind="syntax_error", detail=f"longer than {limits.n_query_chars} characters")
    query = clean_query(query)
    if (refusal := _refuse(query)) is not None:
        return refusal
    denied: list[str] = []
    try:
        with closing(_open(database, limits, denied)) as connection:
            return _fetch(connection.execute(query), limits)
    except MemoryError:
        return Answer(kind="timed_out", detail=f"more than {limits.memory_bytes >> 20} MiB")
    except sqlite3.Error as error:
        return _failure(error, denied)


def clean_query(query: str) -> str:
    """Drop comments, blanks around the query, and semicolons at its end."""
    parts = (" " if found["comment"] else found[0] for found in _TOKEN.finditer(query))
    return "".join(parts).rstrip("; \t\r\n").lstrip()


def is_ordered(query: str) -> bool:
    """Say whether the outermost SELECT has an ORDER BY; those in parentheses do not count."""
    level, previous = 0, ""
    for found in _TOKEN.finditer(query):
        text = found[0].upper()
        level += (text == "(") - (text == ")")
        if level == 0 and (previous, text) == ("ORDER", "BY"):
            return True
        if not (text.isspace() or found["comment"]):
            previous = text
    return False


def same_rows(left: Sequence[Row], right: Sequence[Row], *, ordered: bool) -> bool:
    """Compare rows, as a multiset unless ``ordered``, with tolerance for numbers that are no whole.

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
    """Give every value of the rows a number, close numbers alike, to sort rows past rounding.

    Sorting by the values alone would not do: of (0.30000000000000004, 1) and (0.3, 2) the noise
    in the first column would decide, and differently on the other side.
    """
    number, previous = 0, None
    rank: dict[tuple[int, Any], int] = {}
    for kind, value in sorted({_key(value) for row in rows for value in row}):
        number += not _same_cell(previous, value)
        rank[kind, value], previous = number, value

    def sort_key(row: Row) -> tuple[Any, ...]:
        keys = [_key(value) for value in row]
        return [rank[key] for key in keys], keys

    return sort_key


def _key(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, None
    return (1 if isinstance(value, int | float) else 2 if isinstance(value, str) else 3), value


def _same_cell(left: Any, right: Any) -> bool:
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return type(left) is type(right) and bool(left == right)
    # Counts and keys are exact, however large; a sum of money may be whole on one side by luck.
    if float(left).is_integer() and float(right).is_integer():
        return left == right
    return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _refuse(query: str) -> Answer | None:
    """Refuse what need not, or must not, reach SQLite."""
    if not query:
        return Answer(kind="empty")
    if _NO_TEXT.search(query):
        return Answer(kind="syntax_error", detail="holds a character that no text may hold")
    tokens = [found[0].upper() for found in _TOKEN.finditer(query)]
    if ";" in tokens:
        return Answer(kind="not_a_query", detail="several statements")
    if tokens[0] in _OTHER_COMMANDS:
        return Answer(kind="not_a_query", detail=f"{tokens[0]} is not allowed")
    return None


def _open(database: Path, limits: Limits, denied: list[str]) -> sqlite3.Connection:
    """Open a database so that nothing but reading is left; ``denied`` collects what was tried."""
    uri = f"{database.as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    # Stored text need not be UTF-8, and two equal bytes should still compare as equal.
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.cell_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    for setting in ("temp_store = MEMORY", "trusted_schema = OFF", "query_only = ON"):
        connection.execute(f"PRAGMA {setting}")
    if hasattr(connection, "enable_load_extension"):  # some builds of Python leave it out
        connection.enable_load_extension(False)

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        is_refused_function = action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS
        if action in _ACTIONS and not is_refused_function:
            return sqlite3.SQLITE_OK
        denied.append(str(second or first or action))
        return sqlite3.SQLITE_DENY

    n_checks = iter(range(limits.n_instructions // _INSTRUCTIONS_PER_CHECK))
    connection.set_authorizer(authorize)
    connection.set_progress_handler(lambda: next(n_checks, None) is None, _INSTRUCTIONS_PER_CHECK)
    return connection


def _fetch(cursor: sqlite3.Cursor, limits: Limits) -> Answer:
    rows: list[Row] = []
    n_bytes = 0
    for row in cursor:
        rows.append(row)
        n_bytes += sum(map(sys.getsizeof, row))
        if len(rows) > limits.n_rows:
            return Answer(kind="too_many_rows", detail=f"more than {limits.n_rows} rows")
        if n_bytes > limits.result_bytes:
            return Answer(kind="too_many_rows", detail=f"more than {limits.result_bytes} bytes")
    return Answer(kind="rows", n_columns=len(cursor.description or ()), rows=tuple(rows))


def _failure(error: sqlite3.Error, denied: Sequence[str]) -> Answer:
    code = getattr(error, "sqlite_errorcode", None)
    detail = " ".join(str(error).split())[:200]
    if denied:
        return Answer(kind="not_a_query", detail=f"{denied[0][:100]} is not allowed")
    if code == sqlite3.SQLITE_INTERRUPT:
        return Answer(kind="timed_out", detail="ran out of instructions")
    too_large = code == sqlite3.SQLITE_TOOBIG
    return Answer(kind="too_many_rows" if too_large else "syntax_error", detail=detail)


def _answer_pair(pipe: "Connection[Any, Any]", pair: dict[str, str], limits: Limits) -> None:
    database = Path(pair["database"])
    wanted = run_query(pair["reference"], database, limits)
    pipe.send_bytes(json.dumps([wanted.kind, wanted.detail]).encode("ascii"))
    if wanted.kind != "rows":
        return
    found = run_query(pair["prediction"], database, limits)
    kind = found.kind
    if kind == "rows":
        ordered = is_ordered(clean_query(pair["reference"]))
        same = same_rows(found.rows, wanted.rows, ordered=ordered)
        kind = "correct" if same and found.n_columns == wanted.n_columns else "wrong_rows"
    pipe.send_bytes(json.dumps([kind, found.detail]).encode("ascii"))


def _set_limit(which: int, amount: int) -> None:
    _, hard = resource.getrlimit(which)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    # macOS refuses a limit on address space; the other limits still hold there.
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (amount, hard))


def main() -> None:
    """Answer pairs until the other side hangs up."""
    limits = Limits(**json.loads(sys.argv[2]))
    _set_limit(resource.RLIMIT_AS, limits.memory_bytes)
    _set_limit(resource.RLIMIT_FSIZE, 0)
    _set_limit(resource.RLIMIT_CORE, 0)
    # Ctrl-C reaches the whole process group; the other side decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with closing(pipe), suppress(EOFError, ConnectionError):
        while True:
            pair = json.loads(pipe.recv_bytes())
            # The system counts over a process's life, so each pair moves its limit ahead.
            used = resource.getrusage(resource.RUSAGE_SELF)
            spent_s = math.ceil(used.ru_utime + used.ru_stime)
            _set_limit(resource.RLIMIT_CPU, spent_s + limits.cpu_s)
            _answer_pair(pipe, pair, limits)


if __name__ == "__main__":
    main()
