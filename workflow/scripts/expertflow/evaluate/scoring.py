"""Scoring tasks: base classes, and lookup of a task by its name or file.

A task is one class in one file: ``tasks/NAME.py``, or a user's file that the manifest names.
"""

import importlib
import inspect
import json
import platform
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from expertflow.core.errors import EvaluationError
from expertflow.core.files import sha256_file, sha256_text
from expertflow.core.plugins import list_modules
from expertflow.core.worker import Worker, serve_messages
from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.records import (
    HELD_OUT_LOSS,
    OWN_TASK,
    Example,
    GenerationSpec,
    Judgment,
    ModelAnswers,
)

MEMORY_BYTES = 1 << 30


class ScoringTask:
    """Judges answers one by one in this process, by ``judge``.

    ``fields`` and ``artifacts`` are the inputs that a manifest may name, ``required`` the mandatory
    ones, as ``fields.name`` or ``artifacts.name``, alternatives joined by ``or``; ``packages``
    are distributions whose versions can change a judgment. ``is_choice``: likelihoods of
    ``list_options`` are compared, and nothing is generated.
    """

    metric: str
    fields: ClassVar[frozenset[str]] = frozenset()
    artifacts: ClassVar[frozenset[str]] = frozenset()
    required: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    is_choice: ClassVar[bool] = False

    def __init__(self, spec: GenerationSpec) -> None:
        self.spec = spec

    def judge(self, example: Example, answer: str) -> Judgment:
        """Judge one answer; ``kind`` is ``correct`` or names the error.

        Raises EvaluationError if the reference, or a field of the record, cannot be used.
        """
        raise NotImplementedError

    def score(self, examples: Sequence[Example], answers: Sequence[str]) -> list[Judgment]:
        """Judge answers in order; check ``unavailable_reason`` first.

        Scoring references as answers checks a data set: all must be correct. Raises
        EvaluationError, naming the document, if an argument, artifact or reference is missing or
        unusable.
        """
        judgments = []
        for example, answer in zip(examples, answers, strict=True):
            with name_document(example):
                judgments.append(self.judge(example, answer))
        return judgments

    def list_options(self, example: Example) -> list[str]:
        return []

    def unavailable_reason(self) -> str | None:
        """Return why nothing can be scored here, or null; checked before generation."""
        return None

    def tool_versions(self) -> dict[str, str]:
        """Return the versions of the scoring tools; call it only if the task is available."""
        versions = {package: metadata.version(package) for package in self.packages}
        return {"python": platform.python_version(), **versions}

    def read_field(self, example: Example, name: str) -> Any:
        """Return an argument that the manifest must name; null if the record lacks it."""
        if name not in self.spec.fields:
            raise EvaluationError(
                f"evaluation.fields.{name} is missing; set it to the record field to read"
            )
        return example.fields.get(self.spec.fields[name])

    def read_text(self, example: Example, name: str) -> str:
        value = self.read_field(example, name)
        if isinstance(value, dict):
            # The schema of JSON or of a graph; the data checks accept mappings, too.
            return json.dumps(value)
        if not isinstance(value, str):
            raise EvaluationError(
                f"field {self.spec.fields[name]!r} (evaluation.fields.{name}) should be text, "
                f"found {value!r:.60}"
            )
        return value

    def read_optional(self, example: Example, name: str) -> str | None:
        return self.read_text(example, name) if name in self.spec.fields else None


class IsolatedTask(ScoringTask):
    """A task whose ``judge_texts`` runs in a process with limits, from the task's own file.

    Judgments may be ``timed_out``: some schema patterns never finish, comparing thousands of
    unequal items is quadratic, and no parser bounds the time of its error recovery.
    """

    judge_texts: ClassVar[Callable[..., Judgment]]
    cpu_s = 10
    wall_s = 60.0

    def read_texts(self, example: Example) -> dict[str, str | None]:
        """Return what ``judge_texts`` takes besides the answer and the reference: all fields."""
        # An alternative such as `artifacts.database or fields.schema` requires neither field.
        needed = {name.removeprefix("fields.") for name in self.required}
        return {
            name: (self.read_text if name in needed else self.read_optional)(example, name)
            for name in self.fields
        }

    def make_worker(self) -> Worker:
        options = {"task": inspect.getfile(type(self)), "cpu_s": self.cpu_s}
        return Worker(__name__, options, wall_s=self.wall_s)

    def judge(self, example: Example, answer: str) -> Judgment:
        texts = {"answer": answer, "reference": example.reference, **self.read_texts(example)}
        kind, detail = self.worker.ask(texts)
        if kind == "unusable":
            raise EvaluationError(detail)
        return Judgment(kind, detail)

    @cached_property
    def worker(self) -> Worker:
        # Shared by all sides and baselines: starting one and parsing references take seconds.
        worker = self.make_worker()
        weakref.finalize(self, worker.close)
        return worker


@contextmanager
def name_document(example: Example) -> Iterator[None]:
    try:
        yield
    except EvaluationError as error:
        raise EvaluationError(f"document {example.document_id}: {error}") from error


def main(options: dict[str, Any]) -> None:
    task: Any = None

    def answer(texts: dict[str, Any]) -> tuple[str, str]:
        nonlocal task
        try:
            # Imported within the limits; other tasks' parsers would only cost time.
            task = task or _task_of(_load_file(Path(options["task"])))
            judgment = task.judge_texts(**texts)
        except EvaluationError as error:
            return "unusable", str(error)
        except MemoryError:
            return "timed_out", "ran out of memory"
        return judgment.kind, judgment.detail

    serve_messages(answer, memory_bytes=MEMORY_BYTES, cpu_s=options["cpu_s"])


def judge_answers(
    task: ScoringTask, examples: Sequence[Example], answers: ModelAnswers
) -> list[Judgment]:
    """Judge a model's answers; a question that was not asked counts as wrong."""
    judgments = task.score(examples, answers.texts)
    for i, example in enumerate(examples):
        if (why := answers.not_asked.get(example.document_id)) is not None:
            judgments[i] = Judgment("not_asked", why)
    return judgments


def task_names() -> list[str]:
    """Return the names of this project's tasks; the held-out loss needs no scorer."""
    return [HELD_OUT_LOSS, *list_modules("expertflow.evaluate.tasks")]


def is_own_task(task: str) -> bool:
    return task.endswith(".py")


def make_task(spec: GenerationSpec) -> ScoringTask | None:
    """Return the configured task; raise EvaluationError if a user's file changed or is invalid."""
    path = spec.artifacts.get(OWN_TASK)
    if path is not None and own_digest(spec) != sha256_file(Path(path)):
        raise EvaluationError(f"{path}: changed since this run was planned; run again")
    task = find_task(path or spec.task)
    return None if task is None else task(spec)


def own_digest(spec: GenerationSpec) -> str | None:
    """Return the hash of a user's task, or null for a built-in one."""
    path = spec.artifacts.get(OWN_TASK)
    return None if path is None else spec.content.get(path)


def find_task(task: str) -> type[ScoringTask] | None:
    """Return a task's class, by name or from a user's ``*.py``; null for the held-out loss.

    Raises EvaluationError if there is no such file, or it does not define exactly one task.
    """
    if task == HELD_OUT_LOSS:
        return None
    if is_own_task(task):
        return _task_of(_load_file(Path(task)))
    return _task_of(importlib.import_module(f"expertflow.evaluate.tasks.{task}"))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EvaluationError(f"{path}: no such file; correct evaluation.task")
    # Not by an import, which would leave a cache next to a user's file.
    name = f"own_task_{sha256_text(str(path.resolve()))[:16]}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path.resolve())
    try:
        exec(compile(path.read_bytes(), module.__file__, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise EvaluationError(f"{path}: {type(error).__name__}: {one_line(error)}") from error
    return module


def _task_of(module: ModuleType) -> type[ScoringTask]:
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, ScoringTask)
        and value.__module__ == module.__name__  # defined there, not imported
    ]
    named = ", ".join(one.__name__ for one in found) or "none"
    if len(found) != 1:
        raise EvaluationError(
            f"{module.__file__}: should define one subclass of ScoringTask, found {named}"
        )
    task = found[0]
    lacks = [] if hasattr(task, "metric") else ["metric"]
    if task.judge is ScoringTask.judge and task.score is ScoringTask.score:
        lacks.append("judge")
    if task.judge is IsolatedTask.judge and not hasattr(task, "judge_texts"):  # without a default
        lacks.append("judge_texts")
    if lacks:
        raise EvaluationError(f"{module.__file__}: {named} lacks {' and '.join(lacks)}")
    return task
