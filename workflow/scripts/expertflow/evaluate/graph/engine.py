"""Ask a graph, so that Cypher can be judged by what it returns.

The engine is an optional extra (envs/requirements-graph.lock). A prediction is text from a model,
so it runs in a process of its own (``graph_worker``), which is killed when it overruns the clock.
"""

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.apart.worker import kept_environment
from expertflow.evaluate.graph import worker as graph_worker
from expertflow.evaluate.sql.rows import Row, same_rows

PACKAGES = ("graphqlite", "apsw")
WALL_S = 60.0
BUILD_S = 300.0
MAX_ROWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphAnswer:
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
        self._script, self._wall_s = script, wall_s
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    def __enter__(self) -> "GraphServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, query: str) -> GraphAnswer:
        """Run one query; whatever it does ends in a kind.

        Raises:
            EvaluationError: the graph itself cannot be built.
        """
        pipe = self._start()
        with suppress(ConnectionError):
            pipe.send_bytes(json.dumps(query).encode("ascii"))
        reply = self._receive(self._wall_s)
        if reply["kind"] != "rows":
            return GraphAnswer(kind=reply["kind"], detail=reply["detail"])
        rows = reply["rows"]
        if len(rows) > MAX_ROWS:
            return GraphAnswer(kind="timed_out", detail=f"more than {MAX_ROWS:,} rows")
        return GraphAnswer(kind="rows", rows=tuple(tuple(map(_cell, row)) for row in rows))

    def close(self) -> None:
        """End the process."""
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            pipe.close()
            process.kill()
            process.wait()

    def _receive(self, wall_s: float) -> dict[str, Any]:
        assert self._running is not None
        process, pipe = self._running
        detail = f"no answer within {wall_s:g} s"
        if pipe.poll(wall_s):
            with suppress(EOFError, ConnectionError):
                reply: dict[str, Any] = json.loads(pipe.recv_bytes())
                return reply
            detail = f"its process ended with code {process.wait()}"
        self.close()
        return {"kind": "timed_out", "detail": detail}

    def _start(self) -> "Connection[Any, Any]":
        if self._running is None:
            if not self._script.is_file():
                raise EvaluationError(
                    f"the graph {self._script} is not a file; check evaluation.artefacts.graph"
                )
            ours, theirs = Pipe()
            worker, descriptor = Path(graph_worker.__file__).resolve(), theirs.fileno()
            script = str(self._script.resolve())
            process = subprocess.Popen(
                [sys.executable, "-I", str(worker), str(descriptor), _extension(), script],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=kept_environment(),
            )
            theirs.close()
            self._running = process, ours
            ready = self._receive(BUILD_S)
            if ready["kind"] != "ready":
                self.close()
                raise EvaluationError(f"the graph {self._script} is not built: {ready['detail']}")
        return self._running[1]


def _extension() -> str:
    """Find the engine's library; SQLite adds the ending."""
    found = importlib.util.find_spec("graphqlite")
    if found is None or found.origin is None:
        raise EvaluationError(hindrance() or "graphqlite is not there; install it again")
    return str(Path(found.origin).with_name("graphqlite"))


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
