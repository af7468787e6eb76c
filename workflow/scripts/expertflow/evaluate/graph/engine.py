"""Ask a graph, so that Cypher can be judged by what it returns.

The engine is an optional extra (envs/requirements-graph.lock). A prediction is text from a model,
so it runs in a process of its own (``worker``), which is killed when it overruns the clock.
"""

import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.apart.worker import Worker
from expertflow.evaluate.graph import worker as graph_worker
from expertflow.evaluate.sql.rows import Row, same_rows

PACKAGES = ("graphqlite", "apsw")
WALL_S = 60.0
BUILD_S = 300.0
MAX_ROWS = 10_000


class GraphAnswer(Record, frozen=True, kw_only=True):
    """What a query came to: kind ``rows``, ``not_executed`` or ``timed_out``."""

    kind: str
    detail: str = ""
    rows: tuple[Row, ...] = ()


def hindrance() -> str | None:
    """Say why no graph can be asked here; nothing if it can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"evaluation.artefacts.graph needs {' and '.join(missing)}; "
        "pip install -r envs/requirements-graph.lock, or leave the artefact out"
    )


def tools() -> dict[str, str]:
    """Give the versions of the engine."""
    return {name: metadata.version(name) for name in PACKAGES}


def same_answer(left: GraphAnswer, right: GraphAnswer, *, ordered: bool) -> bool:
    """Compare the rows of two answers, as a multiset unless ``ordered``."""
    return same_rows(left.rows, right.rows, ordered=ordered)


class GraphServer:
    """A process with a graph in memory, started when it is first asked; use it in ``with``."""

    def __init__(self, script: Path, *, wall_s: float = WALL_S) -> None:
        """Take a file with one Cypher statement a line; lines with ``//`` first are comments."""
        self._script = script
        self._worker = Worker(
            Path(graph_worker.__file__),
            {"script": str(script.resolve())},
            wall_s=wall_s,
            quiet=True,
        )

    def __enter__(self) -> "GraphServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def ask(self, query: str) -> GraphAnswer:
        """Run one query; whatever it does ends in a kind.

        Raises:
            EvaluationError: the graph itself cannot be built.
        """
        builds = not self._worker.is_running
        if builds and not self._script.is_file():
            raise EvaluationError(
                f"the graph {self._script} is not a file; check evaluation.artefacts.graph"
            )
        self._worker.send({"query": query})
        if builds:
            kind, detail = self._worker.receive(BUILD_S)
            if kind != "ready":
                self._worker.close()
                raise EvaluationError(f"the graph {self._script} is not built: {detail}")
        kind, found = self._worker.receive()
        if kind != "rows":
            return GraphAnswer(kind=kind, detail=found)
        if len(found) > MAX_ROWS:
            return GraphAnswer(kind="timed_out", detail=f"more than {MAX_ROWS:,} rows")
        return GraphAnswer(kind="rows", rows=tuple(tuple(map(_cell, row)) for row in found))


def _cell(value: Any) -> Any:
    """Make a value that rows can be sorted by: numbers and text stay, the others become text."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return f"text {value}" if isinstance(value, str) else f"value {_written(value)}"


def _written(value: Any) -> str:
    """Write a list without its order: what collect() gathers has none."""
    if isinstance(value, list):
        return f"[{','.join(sorted(map(_written, value)))}]"
    return json.dumps(value, sort_keys=True)
