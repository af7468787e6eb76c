"""Judge SQL by its result: run the reference and the prediction, and compare their rows.

A prediction is untrusted, so queries run in a separate process (``isolation.sql_worker``), fed one
pair at a time and killed on a time-out, which affects only the query at fault.
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
    """Judge against the artifact whose key the field ``database`` holds, by default ``database``.

    Rows are a multiset, ordered only if the reference orders its outermost SELECT; column names do
    not count. Numbers may differ by 1e-6 of their size, integers not at all. Two empty results
    agree, so a database should have rows to tell queries apart. If the reference's ORDER BY leaves
    ties, their order is part of the answer. The schema may be read; random functions are refused in
    both queries, since their results cannot be compared. The clock is the machine's, and the same
    for both.

    Kinds: ``correct``, ``wrong_rows``, ``syntax_error`` (also unknown names and runtime errors),
    ``not_a_query`` (anything but one SELECT), ``timed_out`` (any budget of time or memory),
    ``too_many_rows`` (or too large ones), ``empty``.
    """

    name = "sql_execution"
    metric = "execution_accuracy"
    fields = frozenset({"database"})
    artifacts = frozenset({"database"})
    required = ("artifacts.database",)
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
    if name not in case.artifacts:
        known = ", ".join(sorted(case.artifacts)) or "none"
        raise EvaluationError(
            f"there is no artifact {name!r} to ask (known: {known}); "
            "name it in evaluation.artifacts"
        )
    database = case.artifacts[name]
    if not database.is_file():
        raise EvaluationError(f"its database {database} is not a file; check evaluation.artifacts")
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
