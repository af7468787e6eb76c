"""Judge SQL by what it returns: run the reference and the prediction, and compare their rows.

A prediction is text from a model, so it is treated as hostile: queries run in a process of their
own (``worker``), which this module starts, feeds one pair at a time, and kills when it overruns
the wall clock. That costs the query at fault its verdict, and the others nothing.

                   one pair, as JSON               two answers: reference, then prediction
    judge_queries ───────────────────► sql_worker ─────────────────────────────────────────►
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.apart.worker import Worker
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.sql import worker as sql_worker
from expertflow.evaluate.sql.worker import Limits
from expertflow.evaluate.text import strip_code_fence


class QueryPair(Record, frozen=True, kw_only=True):
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
    A database's own schema may be read; random functions may not be called, by either query, since
    nothing they return can be compared. The clock is the machine's, and the same for both.

    Kinds: ``correct``, ``wrong_rows``, ``syntax_error`` (unknown names and failures while running
    too), ``not_a_query`` (anything but one SELECT), ``timed_out`` (any budget of time or memory),
    ``too_many_rows`` (or too large ones), ``empty``.

    Raises:
        EvaluationError: the database is missing, or a reference fails; names the document.
    """
    limits = limits or Limits()
    script = Path(sql_worker.__file__)
    with closing(Worker(script, asdict(limits), wall_s=limits.wall_s)) as worker:
        return [_judge(pair, worker) for pair in pairs]


def _judge(pair: QueryPair, worker: Worker) -> Verdict:
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
