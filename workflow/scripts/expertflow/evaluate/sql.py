"""Judge SQL by what it returns: run the reference and the prediction, and compare their rows.

A prediction is text from a model, so it is treated as hostile: queries run in a process of their
own (``sql_worker``), which this module starts, feeds one pair at a time, and kills when it overruns
the wall clock. That costs the query at fault its verdict, and the others nothing.

                   one pair, as JSON               two answers: reference, then prediction
    judge_queries ───────────────────► sql_worker ─────────────────────────────────────────►
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.evaluate import sql_worker
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.sql_worker import Limits
from expertflow.evaluate.text import strip_code_fence


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryPair:
    """A predicted query, its reference, and the database that both are asked."""

    document_id: str
    database: Path
    reference: str
    prediction: str


def judge_queries(pairs: Iterable[QueryPair], limits: Limits | None = None) -> list[Verdict]:
    """Judge predicted queries by their rows, in the order given.

    Rows are compared as a multiset, and in order only if the reference orders its outermost
    SELECT; names of columns do not count. Numbers may differ by 1e-6 of their size, whole numbers
    not at all. Two queries that return nothing agree, so a database should have rows to tell
    queries apart. Where the reference's ORDER BY leaves ties, their order is part of the answer.

    Kinds: ``correct``, ``wrong_rows``, ``syntax_error`` (unknown names and failures while running
    too), ``not_a_query`` (anything but one SELECT), ``timed_out`` (any budget of time or memory),
    ``too_many_rows`` (or too large ones), ``empty``.

    Raises:
        EvaluationError: the database is missing, or a reference fails; names the document.
    """
    with closing(_Worker(limits or Limits())) as worker:
        return [_judge(pair, worker) for pair in pairs]


def _judge(pair: QueryPair, worker: "_Worker") -> Verdict:
    where = f"document {pair.document_id}"
    if not pair.database.is_file():
        raise EvaluationError(
            f"{where}: its database {pair.database} is not a file; check evaluation.artefacts"
        )
    worker.send(
        {
            "database": str(pair.database.resolve()),
            "reference": strip_code_fence(pair.reference),
            "prediction": strip_code_fence(pair.prediction),
        }
    )
    kind, detail = worker.receive()
    if kind != "rows":
        raise EvaluationError(
            f"{where}: its reference query fails on {pair.database.name} ({kind}: {detail}); "
            "repair or remove the record"
        )
    kind, detail = worker.receive()
    return Verdict(correct=kind == "correct", kind=kind, detail=detail)


class _Worker:
    """The process that runs queries, started when it is needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    def send(self, message: dict[str, str]) -> None:
        # ASCII with escapes, so that even half a surrogate pair arrives as it was sent. If the
        # process is gone, receive says so.
        with suppress(ConnectionError):
            self._start()[1].send_bytes(json.dumps(message).encode("ascii"))

    def receive(self) -> tuple[str, str]:
        """Wait for one answer, ``(kind, detail)``; silence and death are answers too."""
        process, pipe = self._start()
        detail = f"no answer within {self._limits.wall_s:g} s"
        if pipe.poll(self._limits.wall_s):
            with suppress(EOFError, ConnectionError):
                kind, text = json.loads(pipe.recv_bytes())
                return kind, text
            detail = f"its process ended with code {process.wait()}"
        self.close()
        return "timed_out", detail

    def close(self) -> None:
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            pipe.close()
            process.kill()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], "Connection[Any, Any]"]:
        if self._running is None:
            ours, theirs = Pipe()
            limits = json.dumps(asdict(self._limits))
            # By path and isolated (-I): neither the caller's script nor the libraries it has
            # loaded are imported again, and nothing of the environment's is imported at all.
            worker, descriptor = str(Path(sql_worker.__file__).resolve()), theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-I", worker, str(descriptor), limits],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            theirs.close()
            self._running = process, ours
        return self._running
