"""What is due after a step, its log, and the age of the process that its clock starts from."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.train.records import EvalPoint
from expertflow.train.step_hooks import STEPS_FILE, out_of_patience, truncate_log

AGE = "from expertflow.train.timing import process_age_s; print(process_age_s())"

TICK_S = 0.011


def points(*losses: float) -> list[EvalPoint]:
    return [
        EvalPoint(step=i, loss=loss, n_target_tokens=1, eval_s=0.0) for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "over"),
    [
        ((3.0, 2.0, 1.0), 1, 0.0, False),
        ((3.0, 2.0, 2.0), 1, 0.0, True),
        ((3.0, 2.0, 2.1), 2, 0.0, False),
        ((3.0, 2.0, 2.1, 2.0), 2, 0.0, True),
        ((3.0, 2.0, 2.1, 1.9, 1.95), 2, 0.0, False),
        ((3.0, 2.95, 2.91), 2, 0.1, True),  # slower than min_delta
        ((3.0, 2.95, 2.85), 2, 0.1, False),  # slow, but together they are enough
        ((3.0, 3.0, 3.0), None, 0.0, False),
    ],
)
def test_patience(
    losses: tuple[float, ...], patience: int | None, min_delta: float, over: bool
) -> None:
    assert out_of_patience(points(*losses), patience, min_delta) is over


def resumed(state: Path, *, step: int) -> Any:
    return SimpleNamespace(
        state=state,
        plan=SimpleNamespace(track_per_step_metrics=True),
        processes=SimpleNamespace(is_first=True),
        progress=SimpleNamespace(step=step),
    )


@pytest.mark.parametrize(
    ("step", "kept", "n_lost"), [(2, [1, 2], 0), (3, [1, 2, 3], 0), (5, [1, 2, 3], 2)]
)
def test_steps_after_the_checkpoint_go_and_lost_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, kept: list[int], n_lost: int
) -> None:
    lines = "".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3))
    (tmp_path / STEPS_FILE).write_text(lines + '{"step": 4')
    with caplog.at_level(logging.WARNING):
        truncate_log(resumed(tmp_path, step=step))
    left = [json.loads(line)["step"] for line in (tmp_path / STEPS_FILE).read_text().splitlines()]
    assert left == kept
    assert [f"{n_lost} steps are missing" in r.message for r in caplog.records] == [True] * (
        n_lost > 0
    )


def test_the_age_of_a_process_is_known_to_a_hundredth() -> None:
    before = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", AGE],
        env={"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 0 < float(done.stdout) < time.perf_counter() - before + TICK_S
