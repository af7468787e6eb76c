"""The GPU kit: complete on a CPU with only its few packages, and its own counts."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from bare_python import bare_python
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import train_gpu
from gpu_kit import training
from gpu_kit.training import describe_card

pytestmark = pytest.mark.long

PARTS = "ceilings,lora,lora-sdpa-mask,lora-checkpointing,full,dora,qlora,resume,packing,"
PARTS += "trl,trl-compiled,unsloth"
# Packages missing on a rented machine with torch and transformers, by import name.
ABSENT = (
    "snakemake", "datasets", "trl", "unsloth", "pandas", "jsonschema", "bitsandbytes", "altair",
    "orjson", "pynvml", "fastokens", "sqlglot", "pytest", "hypothesis", "detect_secrets",
    "vl_convert",
)  # fmt: skip


def test_the_complete_kit_runs_small_on_a_cpu_with_few_packages(tmp_path: Path) -> None:
    command = [str(bare_python(tmp_path, ABSENT)), str(ROOT / "bench" / "train_gpu.py")]
    command += ["--device", "cpu", "--model", "tiny", "--soak-s", "0", "--measure-s", "0"]
    command += ["--only", PARTS]
    command += ["--scratch", str(tmp_path), "--output", str(tmp_path / "result.json")]
    # No part may be skipped or stopped on a slow machine.
    command += ["--budget-s", "1800", "--part-limit-s", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    parts = result["parts"]
    assert list(parts) == PARTS.split(",") and result["left_out"] == []
    assert parts["resume"]["passed"] and parts["packing"]["passed"]
    figures = parts["packing"]["figures"]
    assert figures["n_documents"] > 3 and figures["moved_by_others"] == 0
    assert "lora: model checked: head off by 0, packed documents by " in done.stdout
    for name in ("lora", "lora-sdpa-mask", "lora-checkpointing", "full", "dora"):
        part = parts[name]
        assert part["loss_is_finite"] and part["n_steps"] == 3
        assert part["tokens_per_s"] > 0 and part["mfu_of_measured_matmul"] > 0
        # What a CPU does not report is null, never 0.
        assert part["mfu"] is None and part["peak_memory_bytes"] is None
        assert part["predicted"] is None and part["card"] == {"unavailable": "no card"}
    assert parts["qlora"] == {"absent": "bitsandbytes is not installed", "part_s": ANY}
    for name, packages in {"trl": "trl", "trl-compiled": "trl", "unsloth": "trl, unsloth"}.items():
        assert parts[name] == {"absent": f"not installed: datasets, {packages}", "part_s": ANY}
        assert f"{name:>20} not run: not installed: datasets, {packages}" in done.stdout
    assert parts["lora"]["padding_share"] < 0.5
    assert parts["lora-sdpa-mask"]["attention"] == "sdpa" != parts["lora"]["attention"]
    assert parts["lora"]["loss_first"] == pytest.approx(parts["full"]["loss_first"])
    assert parts["lora-checkpointing"]["checkpoint_activations"]
    assert not parts["lora"]["checkpoint_activations"]


def work(folder: Path) -> training.Work:
    shape: dict[str, Any] = {"device": "cpu", "model": "tiny", "sizes": {}}
    return training.Work(folder=folder, soak_s=0.0, measure_s=0.0, **shape)


def killed(name: str, work: training.Work) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising(name: str, work: training.Work) -> None:
    raise ValueError("no such kernel")


def test_a_part_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(part_limit_s=60)
    ends = {killed: "exit -9: no message", raising: "exit 1: ValueError: no such kernel"}
    for part, message in ends.items():
        monkeypatch.setattr(train_gpu.parts, "run", part)
        assert train_gpu.launch_part("lora", work(tmp_path), args) == {"failed": message}


def test_a_card_is_recognized_by_its_drivers_name() -> None:
    known = describe_card("NVIDIA H200", 1)
    assert (known.name, known.peak_bf16_flops_per_s) == ("H200 SXM", 989.5e12)
    assert known.memory_total_bytes == 1
    assert describe_card("NVIDIA H2", 1).peak_bf16_flops_per_s is None
