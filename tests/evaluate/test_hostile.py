"""Hostile predictions are judged wrong and harm nothing; bench/hostile.py has larger ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_predictions import PREDICTIONS
from hostile_run import Surroundings, score_all

from expertflow.evaluate.isolation.sandbox import SandboxLimits
from expertflow.evaluate.tasks.typescript_tests import TypeScriptTests, sandbox_problem

SIZE = 3_000
# These hit limits of many seconds; the others hit the same limits.
SLOW = {"ignores signals", "backtracks", "throws a trap", "forged messages: no answer"}
SLOW |= {"serialization: `Buffer.from`", "reads the tests: the heap"}
SHORT = SandboxLimits(cpu_s=2)


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Surroundings]:
    surroundings = Surroundings(tmp_path)
    yield surroundings
    surroundings.close()


def marked(task: str) -> Any:
    node = [pytest.mark.extra("node")] if task.startswith("typescript_tests") else []
    return pytest.param(task, marks=node)


@pytest.mark.parametrize("task", [marked(task) for task in sorted(PREDICTIONS)])
def test_no_harm_is_done(task: str, around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TypeScriptTests, "limits", SHORT)
    if task.startswith("typescript_tests") and (reason := sandbox_problem()) is not None:
        pytest.skip(reason)
    hostile = {
        name: prediction.replace("{port}", str(around.port))
        for name, prediction in PREDICTIONS[task](SIZE, str(around.canary)).items()
        if name not in SLOW
    }
    verdicts = score_all(task, list(hostile.values()), around)
    judged = dict(zip(hostile, verdicts, strict=True))
    assert [name for name, verdict in judged.items() if verdict.correct] == []
    assert {name: harm for name, v in judged.items() if (harm := around.harm(v))} == {}
