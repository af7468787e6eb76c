"""All scoring tasks, by name. ``held_out_loss`` needs no generated text: it has no scorer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Example, Task, Verdict
from expertflow.evaluate.tasks.base import Case, ScoringTask
from expertflow.evaluate.tasks.choice import MultipleChoice
from expertflow.evaluate.tasks.cypher import Cypher
from expertflow.evaluate.tasks.json_schema import JsonSchema
from expertflow.evaluate.tasks.sql import SqlExecution
from expertflow.evaluate.tasks.text import ExactMatch, FinalAnswer
from expertflow.evaluate.tasks.typescript import TypeScript
from expertflow.evaluate.tasks.typescript_tests import TypeScriptTests

_ALL: tuple[ScoringTask, ...] = (
    SqlExecution(), JsonSchema(), Cypher(), TypeScript(), TypeScriptTests(), MultipleChoice(),
    FinalAnswer(), ExactMatch(),
)  # fmt: skip
TASKS: dict[str, ScoringTask] = {task.name: task for task in _ALL}


def score(
    task: Task,
    *,
    examples: Sequence[Example],
    predictions: Sequence[str],
    fields: Mapping[str, str],
    artefacts: Mapping[str, Path],
) -> list[Verdict]:
    """Judge one prediction for each example, in order; see ``ScoringTask.score``.

    Raises:
        EvaluationError: the task has no scorer or takes no such field, or an argument, an artefact
            or a reference is missing or unusable.
    """
    if task not in TASKS:
        raise EvaluationError(f"task {task!r} has no scorer; choose one of {', '.join(TASKS)}")
    accepted = TASKS[task].fields
    if unknown := sorted(set(fields) - accepted):
        known = ", ".join(sorted(accepted)) or "no fields"
        raise EvaluationError(f"evaluation.fields.{unknown[0]}: task {task!r} takes {known}")
    return TASKS[task].score(
        [
            Case(example=example, prediction=prediction, fields=fields, artefacts=artefacts)
            for example, prediction in zip(examples, predictions, strict=True)
        ]
    )
