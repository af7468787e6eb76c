"""All scoring tasks, by name. ``held_out_loss`` needs no generated text: it has no scorer."""

from collections.abc import Iterator, Mapping
from typing import get_args

from expertflow.evaluate.records import Task
from expertflow.evaluate.tasks.base import ScoringTask


class _Tasks(Mapping[str, ScoringTask]):
    """Tasks imported on first use, as each brings its own parsers."""

    def __getitem__(self, name: str) -> ScoringTask:
        match name:
            case "sql_execution":
                from expertflow.evaluate.tasks.sql import SqlExecution

                return SqlExecution()
            case "json_schema":
                from expertflow.evaluate.tasks.json_schema import JsonSchema

                return JsonSchema()
            case "cypher":
                from expertflow.evaluate.tasks.cypher import Cypher

                return Cypher()
            case "typescript":
                from expertflow.evaluate.tasks.typescript import TypeScript

                return TypeScript()
            case "typescript_tests":
                from expertflow.evaluate.tasks.typescript_tests import TypeScriptTests

                return TypeScriptTests()
            case "multiple_choice":
                from expertflow.evaluate.tasks.choice import MultipleChoice

                return MultipleChoice()
            case "final_answer":
                from expertflow.evaluate.tasks.text import FinalAnswer

                return FinalAnswer()
            case "exact_match":
                from expertflow.evaluate.tasks.text import ExactMatch

                return ExactMatch()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in get_args(Task) if name != "held_out_loss")

    def __len__(self) -> int:
        return sum(1 for _ in self)


TASKS = _Tasks()
