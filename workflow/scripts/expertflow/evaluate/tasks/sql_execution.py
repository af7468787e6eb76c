"""Judge SQL by its result: run the reference and the prediction, and compare their rows.

A prediction is untrusted, so queries run in a separate process (``isolation.sql_worker``), fed one
pair at a time and killed on a time-out, which affects only the query at fault.
"""

import sqlite3
from dataclasses import asdict
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.worker import Worker
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation import sql_worker
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import IsolatedTask


class SqlExecution(IsolatedTask):
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

    metric = "execution_accuracy"
    fields = frozenset({"database"})
    artifacts = frozenset({"database"})
    required = ("artifacts.database",)
    limits = Limits()

    def tool_versions(self) -> dict[str, str]:
        return super().tool_versions() | {"sqlite": sqlite3.sqlite_version}

    def make_worker(self) -> Worker:
        return Worker(sql_worker.__name__, asdict(self.limits), wall_s=self.limits.wall_s)

    def judge(self, example: Example, answer: str) -> Judgment:
        named = self.read_optional(example, "database")
        name = "database" if named is None else named
        if name not in self.spec.artifacts:
            known = ", ".join(sorted(self.spec.artifacts)) or "none"
            raise EvaluationError(
                f"there is no artifact {name!r} to ask (known: {known}); "
                "name it in evaluation.artifacts"
            )
        path = Path(self.spec.artifacts[name])
        if not path.is_file():
            raise EvaluationError(f"its database {path} is not a file; check evaluation.artifacts")
        database = str(path.resolve())
        reference = strip_code_fence(example.reference)
        kind, detail = self.worker.ask({"database": database, "reference": reference})
        if kind != "rows":
            raise EvaluationError(
                f"its reference query fails on {path.name} ({kind}: {detail}); "
                "repair or remove the record"
            )
        prediction = strip_code_fence(answer)
        return Judgment(*self.worker.ask({"database": database, "prediction": prediction}))
