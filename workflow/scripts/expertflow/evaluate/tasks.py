"""The tasks an expert can be scored on: each one's metric, arguments, and scorer.

An argument is what a scorer reads beside the two texts. ``evaluation.fields`` in the manifest says
which field of a record holds it, so any data set can serve a task without being rewritten.
"""

import platform
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.graph import engine as graph
from expertflow.evaluate.graph.rows import CypherPair, judge_by_rows
from expertflow.evaluate.judging import Judged, judge_apart
from expertflow.evaluate.options import judge_choice
from expertflow.evaluate.records import TASK_FIELDS, EvaluationSpec, Example, Task, Verdict
from expertflow.evaluate.sql.scorer import QueryPair, judge_queries
from expertflow.evaluate.text import judge_exact_match, judge_final_answer
from expertflow.evaluate.typescript import by_tests as typescript_tests
from expertflow.evaluate.typescript.by_tests import TestedProgram, judge_programs

T = TypeVar("T")

# `held_out_loss` is measured on every expert and needs no generated text: it has no scorer.
METRICS: dict[Task, str] = {
    "sql_execution": "execution_accuracy",
    "json_schema": "valid_and_equal",
    "cypher": "normalised_match",
    "typescript": "syntax_tree_match",
    "typescript_tests": "tests_passed",
    "final_answer": "final_answer_accuracy",
    "exact_match": "exact_match",
    "multiple_choice": "choice_accuracy",
}


class _Case(Record, frozen=True, kw_only=True):
    """One example and what the model wrote, with the settings that are the same for all."""

    example: Example
    prediction: str
    fields: Mapping[str, str]
    artefacts: Mapping[str, Path]

    def argument(self, name: str) -> str:
        """Read a scorer's argument from the example's record.

        Raises:
            EvaluationError: the manifest does not name its field, or the record has no such text.
        """
        value = self.value(name)
        if not isinstance(value, str):
            raise EvaluationError(
                f"field {self.fields[name]!r} (evaluation.fields.{name}) should hold text, "
                f"found {value!r:.60}"
            )
        return value

    def value(self, name: str) -> Any:
        """Read an argument that need not be text; nothing if the record does not have it."""
        if name not in self.fields:
            raise EvaluationError(
                f"evaluation.fields.{name} is missing; name the record field that holds it"
            )
        return self.example.fields.get(self.fields[name])

    @property
    def prefix(self) -> str:
        """Give the code that the answer completes, where the manifest names its field."""
        return self.argument("prefix") if "prefix" in self.fields else ""


def metric_of(spec: EvaluationSpec) -> str:
    """Name the metric of a task that has a scorer."""
    if spec.task == "cypher" and "graph" in spec.artefacts:
        return "execution_accuracy"
    return METRICS[spec.task]


def hindrance(spec: EvaluationSpec) -> str | None:
    """Say why a task cannot be scored here, before anything is generated; nothing if it can."""
    if spec.task == "typescript_tests":
        if not spec.allow_code_execution:
            return (
                "evaluation.allow_code_execution is false; "
                "set it to true to run what the model writes, in a sandbox"
            )
        return typescript_tests.hindrance()
    if spec.task == "cypher" and "graph" in spec.artefacts:
        return graph.hindrance()
    return None


def tools(spec: EvaluationSpec) -> dict[str, str]:
    """Give the versions of what scores a task here; ask only where nothing hinders it."""
    versions = {"python": platform.python_version()}
    if spec.task == "sql_execution":
        versions["sqlite"] = sqlite3.sqlite_version
    elif spec.task == "typescript_tests":
        versions |= typescript_tests.tools()
    elif spec.task == "cypher" and "graph" in spec.artefacts:
        versions |= graph.tools()
    for package in _PACKAGES.get(spec.task, ()):
        versions[package] = metadata.version(package)
    return versions


def score(
    task: Task,
    *,
    examples: Sequence[Example],
    predictions: Sequence[str],
    fields: Mapping[str, str],
    artefacts: Mapping[str, Path],
) -> list[Verdict]:
    """Judge one prediction for each example, in order; ask ``hindrance`` first.

    ``fields`` maps the task's arguments to record fields: ``database`` (optional, of
    ``sql_execution``: the key of the artefact to ask; without it that is ``database`` itself),
    ``schema`` (``json_schema``: a JSON Schema as text), ``prefix`` (optional, ``typescript`` and
    ``typescript_tests``: code that the answer completes), ``tests`` (``typescript_tests``: code
    that throws unless the program before it is right), ``choices`` and ``answer``
    (``multiple_choice``: the options, and which one is right; see ``options``).

    Scoring references as if they were predictions checks a data set before anything is generated:
    all are correct, or an error names the document.

    Raises:
        EvaluationError: an argument, an artefact or a reference is missing or unusable.
    """
    if task not in _SCORERS:
        raise EvaluationError(f"task {task!r} has no scorer; choose one of {', '.join(_SCORERS)}")
    accepted = TASK_FIELDS[task]
    if unknown := sorted(set(fields) - accepted):
        known = ", ".join(sorted(accepted)) or "no fields"
        raise EvaluationError(f"evaluation.fields.{unknown[0]}: task {task!r} takes {known}")
    cases = [
        _Case(example=example, prediction=prediction, fields=fields, artefacts=artefacts)
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    return _SCORERS[task](cases)


def _score_sql(cases: Sequence[_Case]) -> list[Verdict]:
    return judge_queries(
        QueryPair(
            document_id=case.example.document_id,
            database=_located(_database, case),
            reference=case.example.reference,
            prediction=case.prediction,
        )
        for case in cases
    )


def _database(case: _Case) -> Path:
    name = case.argument("database") if "database" in case.fields else "database"
    if name not in case.artefacts:
        known = ", ".join(sorted(case.artefacts)) or "none"
        raise EvaluationError(
            f"there is no artefact {name!r} to ask (known: {known}); "
            "name it in evaluation.artefacts"
        )
    return case.artefacts[name]


def _one_by_one(judge: Callable[[_Case], Verdict]) -> Callable[[Sequence[_Case]], list[Verdict]]:
    def score_all(cases: Sequence[_Case]) -> list[Verdict]:
        return [_located(judge, case) for case in cases]

    return score_all


def _located(function: Callable[[_Case], T], case: _Case) -> T:
    """Add the document's name to a complaint about its record."""
    try:
        return function(case)
    except EvaluationError as error:
        raise EvaluationError(f"document {case.example.document_id}: {error}") from error


def _apart(
    judge: str, texts: Callable[[_Case], dict[str, str | None]]
) -> Callable[[Sequence[_Case]], list[Verdict]]:
    """Judge in a process with limits; ``texts`` reads what the judge takes beside a prediction."""

    def judged(case: _Case) -> Judged:
        return Judged(
            document_id=case.example.document_id,
            prediction=case.prediction,
            texts={"reference": case.example.reference, **_located(texts, case)},
        )

    return lambda cases: judge_apart(judge, [judged(case) for case in cases])


def _score_typescript_tests(cases: Sequence[_Case]) -> list[Verdict]:
    return judge_programs([_located(_tested_program, case) for case in cases])


def _tested_program(case: _Case) -> TestedProgram:
    return TestedProgram(
        document_id=case.example.document_id,
        prediction=case.prediction,
        prefix=case.prefix,
        tests=case.argument("tests"),
    )


def _score_cypher(cases: Sequence[_Case]) -> list[Verdict]:
    if cases and "graph" in cases[0].artefacts:
        pairs = [_located(_cypher_pair, case) for case in cases]
        return judge_by_rows(pairs, cases[0].artefacts["graph"])
    return _apart("cypher", _cypher_texts)(cases)


def _cypher_pair(case: _Case) -> CypherPair:
    schema = case.argument("schema") if "schema" in case.fields else None
    return CypherPair(
        document_id=case.example.document_id,
        prediction=case.prediction,
        reference=case.example.reference,
        schema=schema,
    )


def _cypher_texts(case: _Case) -> dict[str, str | None]:
    return {"schema": _cypher_pair(case).schema}


def _score_choice(case: _Case) -> Verdict:
    choices, answer = case.value("choices"), case.value("answer")
    return judge_choice(case.prediction, choices=choices, answer=answer)


# Distributions whose versions can change a verdict.
_PACKAGES: dict[Task, tuple[str, ...]] = {
    "cypher": ("graphglot",),
    "json_schema": ("jsonschema", "regex"),
    "typescript": ("tree-sitter", "tree-sitter-typescript"),
}
_SCORERS: dict[Task, Callable[[Sequence[_Case]], list[Verdict]]] = {
    "sql_execution": _score_sql,
    "json_schema": _apart("json_schema", lambda case: {"schema": case.argument("schema")}),
    "cypher": _score_cypher,
    "typescript": _apart("typescript", lambda case: {"prefix": case.prefix}),
    "typescript_tests": _score_typescript_tests,
    "multiple_choice": _one_by_one(_score_choice),
    "final_answer": _one_by_one(
        lambda case: judge_final_answer(case.prediction, case.example.reference)
    ),
    "exact_match": _one_by_one(
        lambda case: judge_exact_match(case.prediction, case.example.reference)
    ),
}
