import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from support import write_tiny_run

from expertflow.core.records import read_record
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.train.job import run_monitor


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
