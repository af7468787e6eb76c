"""All scoring tasks, by name. ``held_out_loss`` needs no generated text: it has no scorer."""

from expertflow.evaluate.tasks.base import ScoringTask
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
