"""Judge SQL by what it returns: run the reference and the prediction, and compare their rows.

A prediction is text from a model, so it is treated as hostile: queries run in a process of their
own (``isolation.sql_worker``), which is fed one pair at a time, and killed when it overruns the
wall clock. That costs the query at fault its verdict, and the others nothing.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation import sql_worker
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.isolation.worker import Worker
from expertflow.evaluate.records import EvaluationSpec, Verdict
from expertflow.evaluate.tasks.base import ScoringCase, ScoringTask


class SqlExecution(ScoringTask):
    """The field ``database`` holds the key of the artefact to ask; without it, ``database``.

    Rows are compared as a multiset, and in order only if the reference orders its outermost
    SELECT; names of columns do not count. Numbers may differ by 1e-6 of their size, whole numbers
    not at all. Two queries that return nothing agree, so a database should have rows to tell
    queries apart. Where the reference's ORDER BY leaves ties, their order is part of the answer.
    A database's own schema may be read; random functions may not be called, by either query, since
    nothing they return can be compared. The clock is the machine's, and the same for both.

    Kinds: ``correct``, ``wrong_rows``, ``syntax_error`` (unknown names and failures while running
    too), ``not_a_query`` (anything but one SELECT), ``timed_out`` (any budget of time or memory),
    ``too_many_rows`` (or too large ones), ``empty``.
    """

    name = "sql_execution"
    metric = "execution_accuracy"
    fields = frozenset({"database"})
    artefacts = frozenset({"database"})
    required = ("artefacts.database",)
    limits = Limits()

    def tools(self, spec: EvaluationSpec) -> dict[str, str]:
        return super().tools(spec) | {"sqlite": sqlite3.sqlite_version}

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        limits = self.limits
        verdicts = []
        with closing(Worker(sql_worker.__name__, asdict(limits), wall_s=limits.wall_s)) as worker:
            for case in cases:
                with case.located():
                    verdicts.append(_judge(case, worker))
        return verdicts


def _judge(case: ScoringCase, worker: Worker) -> Verdict:
    name = case.text("database") if "database" in case.fields else "database"
    if name not in case.artefacts:
        known = ", ".join(sorted(case.artefacts)) or "none"
        raise EvaluationError(
            f"there is no artefact {name!r} to ask (known: {known}); "
            "name it in evaluation.artefacts"
        )
    database = case.artefacts[name]
    if not database.is_file():
        raise EvaluationError(f"its database {database} is not a file; check evaluation.artefacts")
    worker.send(
        {
            "database": str(database.resolve()),
            "reference": strip_code_fence(case.example.reference),
            "prediction": strip_code_fence(case.prediction),
        }
    )
    kind, detail = worker.receive()
    if kind != "rows":
        raise EvaluationError(
            f"its reference query fails on {database.name} ({kind}: {detail}); "
            "repair or remove the record"
        )
    return Verdict(*worker.receive())
