"""Judge SQL by its result: run the reference and the prediction, and compare their rows.

A prediction is untrusted, so queries run in a separate process (``isolation.sql_worker``), fed one
pair at a time and killed on a time-out, which affects only the query at fault.
"""

import sqlite3
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.worker import Worker
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation import sql_worker
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import IsolatedTask


class SqlExecution(IsolatedTask):
    """Judge by the rows of a database, or of several made from the text of a schema.

    The database is the artifact named by the field ``database``, by default ``database``. With the
    field ``schema``, a text of CREATE and perhaps INSERT statements, databases are built from it,
    with made-up rows if it has few or none: a prediction is right if it agrees on all of them.
    Schemas that SQLite cannot build are read in other dialects by sqlglot, and so are their
    queries; references on schemas that sqlglot cannot translate either are unusable.

    Rows are a multiset, ordered only if the reference orders its outermost SELECT; column names do
    not count. Numbers may differ by 1e-9 of their size, integers not at all. Two empty results
    agree, so a database needs rows to distinguish queries. If the reference's ORDER BY leaves
    ties, their order is part of the answer. The schema may be read; random functions are refused in
    both queries, since their results cannot be compared. The clock is the machine's, and the same
    for both.

    Kinds: ``correct``, ``wrong_rows``, ``wrong_elsewhere`` (right on the first of several
    databases: with ``correct`` it is the accuracy on one), ``syntax_error`` (also unknown names and
    runtime errors), ``not_a_query`` (anything but one SELECT), ``timed_out`` (any budget of time or
    memory), ``too_many_rows`` (or too large ones), ``empty``.
    """

    metric = "execution_accuracy"
    fields = frozenset({"database", "schema"})
    artifacts = frozenset({"database"})
    required = ("artifacts.database or fields.schema",)
    limits = Limits()

    def tool_versions(self) -> dict[str, str]:
        reader = {"sqlglot": metadata.version("sqlglot")} if "schema" in self.spec.fields else {}
        return super().tool_versions() | {"sqlite": sqlite3.sqlite_version, **reader}

    def make_worker(self) -> Worker:
        return Worker(sql_worker.__name__, asdict(self.limits), wall_s=self.limits.wall_s)

    def judge(self, example: Example, answer: str) -> Judgment:
        reference, prediction = strip_code_fence(example.reference), strip_code_fence(answer)
        if (schema := self.read_optional(example, "schema")) is not None:
            kind, detail = self.worker.ask({"schema": schema, "reference": reference})
            if kind != "rows":
                raise EvaluationError(detail)
            return Judgment(*self.worker.ask({"prediction": prediction}))
        named = self.read_optional(example, "database")
        name = "database" if named is None else named
        if name not in self.spec.artifacts:
            known = ", ".join(sorted(self.spec.artifacts)) or "none"
            raise EvaluationError(
                f"there is no artifact {name!r} to query (known: {known}); "
                "add it to evaluation.artifacts"
            )
        path = Path(self.spec.artifacts[name])
        if not path.is_file():
            raise EvaluationError(f"its database {path} is not a file; check evaluation.artifacts")
        database = str(path.resolve())
        log = Path(f"{database}-wal")
        if log.is_file() and log.stat().st_size:
            # Opened read-only, SQLite would ignore the rows in it.
            raise EvaluationError(
                f"{log} has changes that its database lacks; close the program that writes it,"
                f" then run sqlite3 {path} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
        kind, detail = self.worker.ask({"database": database, "reference": reference})
        if kind != "rows":
            raise EvaluationError(
                f"its reference query fails on {path.name} ({kind}: {detail}); "
                "fix or remove the record"
            )
        # The worker keeps what it made of the reference for the prediction that follows.
        return Judgment(*self.worker.ask({"prediction": prediction}))
