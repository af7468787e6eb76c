"""What is due after a step, its log, the age of a process, and the monitor beside a training."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from support import SCRIPTS, write_tiny_run

from expertflow.core.records import read_record
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.train.job import run_monitor
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


@pytest.fixture
def plan(tmp_path: Path) -> TrainPlan:
    write_tiny_run(tmp_path)
    return read_record(TrainPlan, tmp_path / "plan.json")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def n_samples(state: Path) -> int:
    path = state / "gpu.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for_samples(state: Path, n: int) -> None:
    deadline = time.monotonic() + 120
    while n_samples(state) < n:
        assert time.monotonic() < deadline, "no samples came"
        time.sleep(0.05)


def record_of(state: Path) -> MonitorRecord:
    return read_record(MonitorRecord, state / "monitor.json")


def test_by_itself_it_follows_the_log_of_steps(plan: TrainPlan, state: Path) -> None:
    lines = [{"step": step, "elapsed_s": 0.05 * step} for step in range(1, 20)]
    automatic = replace(plan, collection_interval_seconds=None, n_steps_per_epoch=20)
    with run_monitor(state, automatic, seen_s=0.0):
        (state / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # Most of these are paced after the log was there.
        wait_for_samples(state, n_samples(state) + 4)
    record = record_of(state)
    assert record.configured_interval_s is None
    assert record.epoch_s == pytest.approx(1.0)
    assert "at most 10 of the 20 samples wanted" in record.remarks[0]


def test_a_monitor_that_dies_leaves_nulls_with_the_reason(plan: TrainPlan, state: Path) -> None:
    (state / "monitor.json").write_text("of an earlier session")
    before = psutil.Process().children()
    with run_monitor(state, plan, seen_s=0.0):
        wait_for_samples(state, 1)
        (monitor,) = set(psutil.Process().children()) - set(before)
        os.kill(monitor.pid, signal.SIGKILL)
    record = record_of(state)
    assert record.gpu_name is None and record.monitor_cpu_fraction is None
    assert record.unavailable["gpu_name"] == "the monitor ended without a summary"
    assert record.n_samples >= 1 and record.ram_used_bytes is not None
