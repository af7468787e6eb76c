"""What profiles/slurm works out for itself, from the cluster's commands and the environment."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yte
from support import ROOT

PROFILE = ROOT / "profiles" / "slurm" / "config.yaml"


def profile() -> dict[str, Any]:
    made: dict[str, Any] = yte.process_yaml(PROFILE.read_text(), require_use_yte=True)
    return made


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path / "sacct"


@pytest.mark.parametrize(("script", "command"), [("exit 0", "sacct"), ("exit 1", "squeue")])
def test_sacct_is_asked_only_where_it_answers(sacct: Path, script: str, command: str) -> None:
    sacct.write_text(f"#!/bin/sh\n{script}\n")
    sacct.chmod(0o755)
    assert profile()["slurm-status-command"] == command


def test_squeue_is_asked_where_there_is_no_sacct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert profile()["slurm-status-command"] == "squeue"


def test_names_of_the_cluster_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU", "GPU", "GPU_MODEL", "GPU_MINUTES", "GPU_MEM_MB", "ACCOUNT", "GPUS"):
        monkeypatch.delenv(f"EXPERTFLOW_SLURM_{name}", raising=False)
    plain = profile()
    assert plain["default-resources"]["slurm_partition"] == "cpu"
    assert plain["set-resources"]["train_expert"]["slurm_partition"] == "gpu"
    assert "slurm_account" not in plain["default-resources"]
    assert "gpu_model" not in plain["set-resources"]["train_expert"]

    own = {"CPU": "batch", "GPU": "h100", "GPU_MODEL": "nvidia_h100", "ACCOUNT": "lab",
           "GPUS": "8", "GPU_MINUTES": "2880", "GPU_MEM_MB": "128000"}  # fmt: skip
    for name, value in own.items():
        monkeypatch.setenv(f"EXPERTFLOW_SLURM_{name}", value)
    named = profile()
    assert named["default-resources"]["slurm_partition"] == "batch"
    assert named["default-resources"]["slurm_account"] == "lab"
    assert named["resources"] == ["gpu=8"]
    assert "runtime" not in plain["set-resources"]["train_expert"]
    assert named["set-resources"]["train_expert"]["runtime"] == 2880
    for rule in ("train_expert", "evaluate_expert", "ablate_variant", "tune_expert"):
        assert named["set-resources"][rule]["slurm_partition"] == "h100"
        assert named["set-resources"][rule]["gpu_model"] == "nvidia_h100"
        assert named["set-resources"][rule]["mem_mb"] == 128000


def test_all_rules_of_the_group_are_in_the_partition_with_cards() -> None:
    made = profile()
    grouped = [line.split("=")[0] for line in made["groups"]]
    assert grouped == ["stage_to_nvme", "train_expert", "evaluate_expert"]
    partitions = {made["set-resources"][rule]["slurm_partition"] for rule in grouped}
    assert len(partitions) == 1, "Slurm gives a group one partition"


def test_a_missing_plugin_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "executor" in name else find(name)
    )
    with pytest.raises(SystemExit, match="needs snakemake-executor-plugin-slurm; make slurm, or"):
        profile()
