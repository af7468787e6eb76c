from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from support import write_tiny_run

from expertflow.core.errors import HardwareError, TrainingError
from expertflow.core.records import read_record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import TrainPlan
from expertflow.train import preflight as module
from expertflow.train.base import read_facts
from expertflow.train.load import load_base
from expertflow.train.preflight import preflight

Usage = namedtuple("Usage", "total used free")
H100 = GpuFacts(
    name="H100 SXM", memory_total_bytes=None, compute_capability=None, peak_bf16_flops_per_s=None,
    peak_fp16_flops_per_s=None, peak_tf32_flops_per_s=None, peak_bandwidth_bytes_per_s=None,
    power_limit_w=None, source="test",
)  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> TrainPlan:
    write_tiny_run(tmp_path)
    return read_record(TrainPlan, tmp_path / "plan.json")


def test_readings_are_taken_before_training(plan: TrainPlan, tmp_path: Path) -> None:
    readings = preflight(plan, tmp_path / "state")
    assert readings["free_disk_bytes"] > readings["needed_disk_bytes"] > 0
    assert readings["bf16_supported"] is None


def test_a_disk_without_room_for_checkpoints_is_refused(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    with pytest.raises(HardwareError, match=r"0\.0 GB free and .* needed for 4 checkpoints"):
        preflight(plan, tmp_path / "state")


def test_a_plan_for_a_card_is_refused_without_one(plan: TrainPlan, tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="the plan is for H100 SXM and torch sees no CUDA"):
        preflight(replace(plan, gpu=H100), tmp_path / "state")


def test_an_old_package_is_refused(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.FLOORS, "torch", "99.0")
    with pytest.raises(HardwareError, match=r"torch .* is older than 99\.0"):
        preflight(plan, tmp_path / "state")


def test_an_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(TrainingError, match="cannot be loaded"):
        load_base(str(tmp_path), dtype=None, attention_name="sdpa")  # type: ignore[arg-type]
