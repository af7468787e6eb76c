"""Score hostile predictions for every task and hostile schemas; count the contained ones.

    PYTHONPATH=workflow/scripts:tests:tests/evaluate python bench/hostile.py

A prediction is contained if it is judged wrong in time and leaves no trace: no file, process,
connection or environment variable. A schema is contained if judging it is aborted in time.
The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile_predictions import PREDICTIONS
from hostile_run import Surroundings, score_all
from hostile_schemas import hostile_schemas

from expertflow.data.checks.json_schema import find_fault
from expertflow.evaluate.tasks import typescript_tests

SCHEMAS = "data: json_schema"
# Longer than any answer of a model; some predictions are many times longer.
SIZE = 30_000
# The slowest task's prediction is judged within sixty seconds; the machine may be busy.
MOST_S = 120.0
# A prediction's name, how it was judged, the seconds that took, and its harm.
Trial = tuple[str, str, float, list[str]]


def try_predictions(task: str, n: int) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        around = Surroundings(Path(folder))
        for name, prediction in PREDICTIONS[task](n, str(around.canary)).items():
            start = time.monotonic()
            (judged,) = score_all(task, [prediction.replace("{port}", str(around.port))], around)
            wall_s, harm = time.monotonic() - start, around.harm(judged)
            if judged.correct:
                harm.append("judged correct")
            yield name, judged.kind, wall_s, harm
        around.close()


def try_schemas() -> Iterator[Trial]:
    for name, (schema, document) in hostile_schemas().items():
        start = time.monotonic()
        kind, _ = find_fault(json.dumps(document), schema) or ("correct", "")
        harm = [] if kind == "schema_too_costly" else ["it was judged"]
        yield name, kind, time.monotonic() - start, harm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help="all by default")
    arguments = parser.parse_args()
    n_trials = n_contained = 0
    slowest: list[Any] = []
    skipped: dict[str, str] = {}
    print(f"{'task':29} {'prediction':24} {'judged':17} {'s':>6}  contained")
    for task in arguments.tasks or [*PREDICTIONS, SCHEMAS]:
        if task.startswith("typescript_tests") and (reason := typescript_tests.sandbox_problem()):
            skipped[task] = reason
            continue
        trials = try_schemas() if task == SCHEMAS else try_predictions(task, SIZE)
        for name, kind, wall_s, harm in trials:
            contained = not harm and wall_s <= MOST_S
            n_trials += 1
            n_contained += contained
            slowest = max(slowest, [wall_s, task, name])
            word = "yes" if contained else f"NO {', '.join(harm)}"
            print(f"{task:29} {name:24} {kind:17} {wall_s:6.2f}  {word}", flush=True)
    print(f"contained {n_contained} of {n_trials}")
    found = {"n_predictions": n_trials, "n_contained": n_contained}
    found["slowest"] = [*slowest[1:], round(slowest[0], 1)] if slowest else None
    print(json.dumps({**found, "skipped": skipped}))


if __name__ == "__main__":
    main()
