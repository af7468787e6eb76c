"""Run untrusted Cypher on a small graph, in a worker process.

The engine is graphqlite, an extension of SQLite, in apsw's SQLite. The graph is built in memory
from a file of statements; then writes are refused and no file can be opened, because the process
may open no more descriptors: otherwise the engine's LOAD CSV could read any file. Budgets of
instructions, bytes, memory and processor time end long queries. apsw is imported late, as this
module is imported for its path even without the extra.
"""

import importlib.util
import json
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from expertflow.core.strict_json import refuse_repeats
from expertflow.core.worker import allow_processor_time, serve_messages, set_limit
from expertflow.evaluate.isolation.rows import NO_TEXT, REFUSED_FUNCTIONS, one_line

N_INSTRUCTIONS = 100_000_000
RESULT_BYTES = 10_000_000
MEMORY_BYTES = 1 << 30
CPU_S = 20
BUILD_CPU_S = 300
_INSTRUCTIONS_PER_CHECK = 10_000
# Codes of SQLite's authorizer: FUNCTION, READ, RECURSIVE, SAVEPOINT, SELECT.
_FUNCTION = 31
_ALLOWED = {_FUNCTION, 20, 33, 32, 21}
_OK, _DENY = 0, 1


class _Graph:
    def __init__(self, script: Path) -> None:
        import apsw

        engine = importlib.util.find_spec("graphqlite")
        if engine is None or engine.origin is None:
            raise ValueError("graphqlite is missing; install it again")
        self._n_left = 0
        self._connection = apsw.Connection(":memory:")
        self._connection.enable_load_extension(True)
        self._connection.load_extension(str(Path(engine.origin).with_name("graphqlite")))
        self._connection.enable_load_extension(False)  # only the engine needed it
        for number, line in enumerate(script.read_text("utf-8-sig").split("\n"), start=1):
            statement = line.strip().rstrip(";")
            if statement and not statement.startswith("//"):
                try:
                    self._run(statement)
                except apsw.Error as error:
                    raise ValueError(f"line {number}: {_message(error)}") from error
        self._connection.execute("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON")
        self._connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)
        self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, RESULT_BYTES)
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._is_spent, _INSTRUCTIONS_PER_CHECK)

    def _run(self, query: str) -> Any:
        # One row, one column: JSON.
        [[answer]] = self._connection.execute("SELECT cypher(?)", (query,))
        return answer

    def _is_spent(self) -> bool:
        self._n_left -= _INSTRUCTIONS_PER_CHECK
        return self._n_left < 0

    def run_query(self, query: str) -> tuple[str, Any]:
        import apsw

        if NO_TEXT.search(query):
            return "not_executed", "contains a NUL character or a lone surrogate"
        self._n_left = N_INSTRUCTIONS
        try:
            text = self._run(query)
            # Two columns of one name would be compared as one.
            rows = json.loads(text, object_pairs_hook=refuse_repeats) if text else []
        except (apsw.InterruptError, apsw.TooBigError, apsw.NoMemError, MemoryError) as error:
            return "timed_out", type(error).__name__
        except apsw.Error as error:
            kind = "timed_out" if self._n_left < 0 else "not_executed"
            return kind, _message(error)
        except (RecursionError, ValueError) as error:  # also a lone surrogate from an escape
            return "not_executed", f"its result cannot be read: {one_line(error)}"
        if not isinstance(rows, list):
            return "not_executed", "the engine returned no rows"
        # A single-cell result may come without its name.
        return "rows", [[*row.values()] if isinstance(row, dict) else [row] for row in rows]


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    refused = action == _FUNCTION and second in REFUSED_FUNCTIONS
    return _OK if action in _ALLOWED and not refused else _DENY


def _message(error: Exception) -> str:
    text = str(error)
    with suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["error"])
    return one_line(text)


def main(_options: dict[str, str]) -> None:
    graph: _Graph | None = None

    def answer(message: dict[str, str]) -> tuple[str, Any]:
        nonlocal graph
        if graph is not None:
            return graph.run_query(message["query"])
        import apsw

        allow_processor_time(BUILD_CPU_S)
        try:
            graph = _Graph(Path(message["script"]))
        except (apsw.Error, OSError, ValueError, MemoryError) as error:
            return "failed", str(error)
        # The lowest free number becomes the limit, so no descriptor can be opened.
        free = os.dup(0)
        os.close(free)
        set_limit(resource.RLIMIT_NOFILE, free)
        return "ready", ""

    serve_messages(answer, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
