import logging
import os
from collections import namedtuple
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import write_tiny_run

from expertflow.core.errors import HardwareError, TrainingError
from expertflow.core.records import read_record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import TrainPlan
from expertflow.train import preflight as module
from expertflow.train.model.base import read_facts
from expertflow.train.model.load import load_base
from expertflow.train.preflight import run_preflight

Usage = namedtuple("Usage", "total used free")
H100 = GpuFacts(name="H100 SXM", source="test")


@pytest.fixture
def plan(tmp_path: Path) -> TrainPlan:
    write_tiny_run(tmp_path)
    return read_record(TrainPlan, tmp_path / "plan.json")


def test_readings_are_taken_before_training(plan: TrainPlan, tmp_path: Path) -> None:
    readings = run_preflight(plan, tmp_path / "state")
    assert readings["free_disk_bytes"] > readings["needed_disk_bytes"] > 0
    assert readings["bf16_supported"] is None
    machine = readings["machine"]
    assert machine["ram_usable_bytes"] > 0 and machine["n_cpus_usable"] == readings["n_cpus"]
    assert readings["free_memory_bytes"] <= machine["ram_usable_bytes"]
    assert readings["rows_read_bytes_per_s"] is None and readings["rows_read_method"]
    # Nothing is written to disks just before a training.
    assert all(place["read_bytes_per_s"] is None for place in machine["scratch"])


def card(monkeypatch: pytest.MonkeyPatch, name: str = "H100 SXM", *, bf16: bool = True) -> None:
    cuda = module.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda: name)
    # Asked plainly, torch counts what it imitates.
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation=True: (
        bf16 or including_emulation
    ))  # fmt: skip


def test_a_card_without_bf16_is_refused(plan: TrainPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "Tesla T4", bf16=False)
    with pytest.raises(HardwareError, match=r"Tesla T4 has none; .* hardware=auto"):
        module._check_gpu(replace(plan, precision="bf16"), H100)
    assert module._check_gpu(replace(plan, precision="fp16"), H100) == "Tesla T4"


def test_another_card_than_the_plans_is_said(
    plan: TrainPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for name in (H100.name, "NVIDIA L4"):
        card(monkeypatch, name)
        module._check_gpu(plan, H100)
    assert caplog.messages == ["the plan is for H100 SXM, the card is NVIDIA L4"]


def test_a_card_that_others_hold_is_refused_by_name(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(monkeypatch)
    held = "GPU 0 has 5.0 GB free; held by python (pid 7, 70.0 GB)"
    monkeypatch.setattr(module, "least_free_gpu_memory", lambda n_gpus: (5 * 10**9, held))
    wanted = replace(plan, gpu=H100, predicted_peak_bytes=40 * 10**9)
    with pytest.raises(
        HardwareError, match=r"needs 40\.0 GB .* held by python \(pid 7, 70\.0 GB\)"
    ):
        run_preflight(wanted, tmp_path / "state")


def test_products_are_made_to_repeat_before_the_first_one(
    plan: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch asks once, at the first product of a process, and the measured one may be the first."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen = []

    def measured(dtype: object) -> float:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return 1e12

    monkeypatch.setattr(module, "measured_matmul_flops_per_s", measured)
    for deterministic in (False, True):
        module._measured_peak(
            replace(plan, gpu=H100, precision="bf16", deterministic=deterministic)
        )
    assert seen == [None, ":4096:8"]
    known = replace(H100, peak_bf16_flops_per_s=1.0)
    assert module._measured_peak(replace(plan, gpu=known, precision="bf16")) is None


def test_a_disk_without_room_for_checkpoints_is_refused(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    with pytest.raises(HardwareError, match=r"0\.0 GB free and .* needed for 4 checkpoints"):
        run_preflight(plan, tmp_path / "state")


def test_a_plan_for_a_card_is_refused_without_one(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="the plan is for H100 SXM and torch sees no CUDA"):
        run_preflight(replace(plan, gpu=H100), tmp_path / "state")


def test_an_old_package_is_refused(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.FLOORS, "torch", "99.0")
    with pytest.raises(HardwareError, match=r"torch .* is older than 99\.0"):
        run_preflight(plan, tmp_path / "state")


def test_an_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(TrainingError, match="cannot be loaded"):
        load_base(str(tmp_path), dtype=None, attention_name="sdpa")  # type: ignore[arg-type]
