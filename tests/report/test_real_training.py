"""The receipt of a real, tiny training: its clock, its monitor and its tokens agree."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import made_up_runs
import pytest
from msgspec.structs import replace
from support import ROOT, start_trainer, write_tiny_run

from expertflow.core.records import read_record
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.inputs import ReportInputs, read_lines
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import KernelProfile, StepRecord, TrainingRecord

sys.path.append(str(ROOT / "tests" / "train"))

from resting import start_resting, wait_for_checkpoints

pytestmark = pytest.mark.long

RECORDS = {
    "plan": TrainPlan,
    "packing": PackingRecord,
    "training": TrainingRecord,
    "monitor": MonitorRecord,
}


def _finish(folder: Path) -> ReportInputs:
    process = start_trainer(folder)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    made_up = made_up_runs.make_cpu_inputs()
    real: dict[str, Any] = {
        name: read_record(cls, folder / f"{name}.json") for name, cls in RECORDS.items()
    }
    return replace(
        made_up,
        **real,
        steps=read_lines(StepRecord, folder / "steps.jsonl"),
        samples=read_lines(GpuSample, folder / "gpu.jsonl"),
        preflight=json.loads((folder / "preflight.json").read_text(encoding="utf-8")),
        profile=read_record(KernelProfile, folder / "profile" / "kernels.json"),
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    """Train some epochs, killed once on the way, long before the end."""
    folder = tmp_path_factory.mktemp("real")
    write_tiny_run(folder, n_steps=150)
    process = start_resting(folder)
    wait_for_checkpoints(folder, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return _finish(folder)


def test_receipt_of_a_resumed_run_holds(inputs: ReportInputs) -> None:
    report = build_report(inputs, {})
    check_report(report, inputs)
    assert inputs.training.n_sessions == 2
    assert report.time.split_source == "stamps"
    assert "rows-not-compared" not in {finding.code for finding in report.findings}
