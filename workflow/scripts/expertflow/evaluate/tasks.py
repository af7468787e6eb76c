"""The tasks an expert can be scored on: each one's metric, arguments, and scorer.

An argument is what a scorer reads beside the two texts. ``evaluation.fields`` in the manifest says
which field of a record holds it, so any data set can serve a task without being rewritten.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.cypher import judge_cypher
from expertflow.evaluate.records import Example, Task, Verdict
from expertflow.evaluate.sql import QueryPair, judge_queries
from expertflow.evaluate.structured import judge_json
from expertflow.evaluate.text import judge_exact_match, judge_final_answer
from expertflow.evaluate.typescript import judge_typescript

T = TypeVar("T")

# `held_out_loss` is measured on every expert and needs no generated text: it has no scorer.
METRICS: dict[Task, str] = {
    "sql_execution": "execution_accuracy",
    "json_schema": "valid_and_equal",
    "cypher": "normalised_match",
    "typescript": "syntax_tree_match",
    "final_answer": "final_answer_accuracy",
    "exact_match": "exact_match",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
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
        if name not in self.fields:
            raise EvaluationError(
                f"evaluation.fields.{name} is missing; name the record field that holds it"
            )
        value = self.example.fields.get(self.fields[name])
        if not isinstance(value, str):
            raise EvaluationError(
                f"field {self.fields[name]!r} (evaluation.fields.{name}) should hold text, "
                f"found {value!r:.60}"
            )
        return value


def score(
    task: Task,
    *,
    examples: Sequence[Example],
    predictions: Sequence[str],
    fields: Mapping[str, str],
    artefacts: Mapping[str, Path],
) -> list[Verdict]:
    """Judge one prediction for each example, in order.

    ``fields`` maps the task's arguments to record fields: ``database`` (optional, of
    ``sql_execution``: the key of the artefact to ask; without it that is ``database`` itself),
    ``schema`` (``json_schema``: a JSON Schema as text) and ``prefix`` (optional, ``typescript``:
    code that the answer completes).

    Scoring references as if they were predictions checks a data set before anything is generated:
    all are correct, or an error names the document.

    Raises:
        EvaluationError: an argument, an artefact or a reference is missing or unusable.
    """
    if task not in _SCORERS:
        raise EvaluationError(f"task {task!r} has no scorer; choose one of {', '.join(_SCORERS)}")
    accepted = _ARGUMENTS[task]
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


def _score_json(case: _Case) -> Verdict:
    schema = case.argument("schema")
    return judge_json(case.prediction, reference=case.example.reference, schema=schema)


def _score_typescript(case: _Case) -> Verdict:
    prefix = case.argument("prefix") if "prefix" in case.fields else ""
    return judge_typescript(case.prediction, reference=case.example.reference, prefix=prefix)


_ARGUMENTS: dict[Task, frozenset[str]] = {
    "sql_execution": frozenset({"database"}),
    "json_schema": frozenset({"schema"}),
    "cypher": frozenset(),
    "typescript": frozenset({"prefix"}),
    "final_answer": frozenset(),
    "exact_match": frozenset(),
}
_SCORERS: dict[Task, Callable[[Sequence[_Case]], list[Verdict]]] = {
    "sql_execution": _score_sql,
    "json_schema": _one_by_one(_score_json),
    "cypher": _one_by_one(lambda case: judge_cypher(case.prediction, case.example.reference)),
    "typescript": _one_by_one(_score_typescript),
    "final_answer": _one_by_one(
        lambda case: judge_final_answer(case.prediction, case.example.reference)
    ),
    "exact_match": _one_by_one(
        lambda case: judge_exact_match(case.prediction, case.example.reference)
    ),
}
