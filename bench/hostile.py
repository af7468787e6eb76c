"""Score hostile predictions for every task and hostile schemas; count the contained ones.

    PYTHONPATH=workflow/scripts:tests:tests/evaluate:tests/data/checks python bench/hostile.py

A prediction is contained if it is judged wrong in time and leaves no trace: no file, process,
connection or environment variable. A schema is contained if judging it is aborted in time.
The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from hostile_predictions import PREDICTIONS
from hostile_run import Surroundings, score_all
from hostile_schemas import hostile_schemas

from expertflow.core.records import Record
from expertflow.data.checks.json_schema import find_fault
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks import typescript_tests

SCHEMAS = "data: json_schema"
# Longer than any answer of a model; some predictions are many times longer.
SIZE = 30_000


# The slowest task's prediction is judged within sixty seconds; the machine may be busy.
MOST_S = 120.0


class Trial(Record, frozen=True):
    """A prediction's judgment and its side effects."""

    task: str
    name: str
    judgment: Judgment
    wall_s: float
    harm: tuple[str, ...]

    @property
    def contained(self) -> bool:
        return not (self.judgment.correct or self.harm or self.wall_s > MOST_S)


def try_task(task: str, n: int, around: Surroundings) -> list[Trial]:
    trials = []
    for name, prediction in PREDICTIONS[task](n, str(around.canary)).items():
        prediction = prediction.replace("{port}", str(around.port))
        start = time.monotonic()
        (judgment,) = score_all(task, [prediction], around)
        wall_s = time.monotonic() - start
        trials.append(Trial(task, name, judgment, wall_s, tuple(around.harm(judgment))))
    return trials


def try_schemas() -> list[Trial]:
    trials = []
    for name, (schema, document) in hostile_schemas().items():
        start = time.monotonic()
        kind, detail = find_fault(document, schema) or ("correct", "")
        wall_s = time.monotonic() - start
        harm = () if kind == "schema_too_costly" else ("it was judged",)
        trials.append(Trial(SCHEMAS, name, Judgment(kind, detail), wall_s, harm))
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help="all by default")
    parser.add_argument("--size", type=int, default=SIZE)
    arguments = parser.parse_args()
    trials: list[Trial] = []
    skipped: dict[str, str] = {}
    for task in arguments.tasks or [*PREDICTIONS, SCHEMAS]:
        if task == SCHEMAS:
            trials += try_schemas()
            continue
        if task.startswith("typescript_tests") and (reason := typescript_tests.sandbox_problem()):
            skipped[task] = reason
            continue
        with tempfile.TemporaryDirectory() as folder:
            around = Surroundings(Path(folder))
            trials += try_task(task, arguments.size, around)
            around.close()
    print(f"{'task':29} {'prediction':24} {'judged':17} {'s':>6}  contained")
    for trial in trials:
        contained = "yes" if trial.contained else f"NO {', '.join(trial.harm)}"
        kind = trial.judgment.kind
        print(f"{trial.task:29} {trial.name:24} {kind:17} {trial.wall_s:6.2f}  {contained}")
    n_contained = sum(trial.contained for trial in trials)
    print(f"contained {n_contained} of {len(trials)}")
    slowest = max(trials, key=lambda trial: trial.wall_s, default=None)
    print(
        json.dumps(
            {
                "n_predictions": len(trials),
                "n_contained": n_contained,
                "slowest": slowest and [slowest.task, slowest.name, round(slowest.wall_s, 1)],
                "skipped": skipped,
            }
        )
    )


if __name__ == "__main__":
    main()
