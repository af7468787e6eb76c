"""Base classes of scoring tasks: metric, inputs, and how a prediction is judged.

To add a task, write a subclass in this folder, and add its name to ``records.Task`` and its object
to ``registry.TASKS``.
"""

import importlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.isolation.worker import Reply, Worker, serve
from expertflow.evaluate.records import EvaluationSpec, Example, Task, Verdict

MEMORY_BYTES = 1 << 30


class ScoringCase(Record, frozen=True):
    """An example and its prediction; ``fields`` maps the task's arguments to record fields."""

    example: Example
    prediction: str
    fields: Mapping[str, str]
    artifacts: Mapping[str, Path]

    def value(self, name: str) -> Any:
        """Return an argument that the manifest must name; null if the record lacks it."""
        if name not in self.fields:
            raise EvaluationError(
                f"evaluation.fields.{name} is missing; name the record field that holds it"
            )
        return self.example.fields.get(self.fields[name])

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            raise EvaluationError(
                f"field {self.fields[name]!r} (evaluation.fields.{name}) should hold text, "
                f"found {value!r:.60}"
            )
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self.fields else None

    @contextmanager
    def located(self) -> Iterator[None]:
        try:
            yield
        except EvaluationError as error:
            raise EvaluationError(f"document {self.example.document_id}: {error}") from error


class ScoringTask:
    """A task with a scorer; this class judges cases one by one in this process.

    ``fields`` and ``artifacts`` are its possible inputs, ``required`` the mandatory ones, as
    ``fields.name`` or ``artifacts.name``; ``packages`` are distributions whose versions can change
    a verdict.
    """

    name: Task
    metric: str
    fields: frozenset[str] = frozenset()
    artifacts: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def metric_of(self, spec: EvaluationSpec) -> str:
        return self.metric

    def unavailable_reason(self, spec: EvaluationSpec) -> str | None:
        """Return why nothing can be scored here, checked before generation; null if it can."""
        return None

    def tools(self, spec: EvaluationSpec) -> dict[str, str]:
        """Return the versions of what scores; call it only where nothing is unavailable."""
        versions = {package: metadata.version(package) for package in self.packages}
        return {"python": platform.python_version(), **versions}

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        """Judge predictions in order, after ``unavailable_reason``.

        Scoring references as predictions checks a data set: all must be correct. Raises
        EvaluationError, naming the document, if an argument, artifact or reference is missing or
        unusable.
        """
        verdicts = []
        for case in cases:
            with case.located():
                verdicts.append(self.judge_case(case))
        return verdicts

    def judge_case(self, case: ScoringCase) -> Verdict:
        raise NotImplementedError


class IsolatedTask(ScoringTask):
    """A task whose module has a function ``judge(prediction, reference, other texts)``.

    It runs in a process with limits, and verdicts may be ``timed_out``: some schema patterns search
    without end, comparing thousands of unequal items is quadratic, and no parser bounds the time of
    its error recovery.
    """

    cpu_s = 10
    wall_s = 60.0

    def texts(self, case: ScoringCase) -> dict[str, str | None]:
        raise NotImplementedError

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        options = {"judge": type(self).__module__, "cpu_s": self.cpu_s}
        verdicts = []
        with closing(Worker(__name__, options, wall_s=self.wall_s)) as worker:
            for case in cases:
                with case.located():
                    texts = {"reference": case.example.reference, **self.texts(case)}
                    worker.send({"prediction": case.prediction, **texts})
                    kind, detail = worker.receive()
                    if kind == "unusable":
                        raise EvaluationError(detail)
                    verdicts.append(Verdict(kind, detail))
        return verdicts


def main(options: dict[str, Any]) -> None:
    def answer(texts: dict[str, Any], reply: Reply) -> None:
        # Imported within the limits; other tasks' parsers would only cost time.
        judge = importlib.import_module(options["judge"]).judge
        try:
            verdict = judge(**texts)
        except EvaluationError as error:
            reply("unusable", str(error))
        except MemoryError:
            reply("timed_out", "ran out of memory")
        else:
            reply(verdict.kind, verdict.detail)

    serve(answer, memory_bytes=MEMORY_BYTES, cpu_s=options["cpu_s"])
