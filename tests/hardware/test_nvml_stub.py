"""The monitor with the real pynvml and a scripted driver. All of it is marked as simulated."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvml_stub
import pytest
from support import ROOT

from expertflow.hardware.nvml import HIDDEN, MIG, visible_gpus


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def watch(
    library: Path, folder: Path, *, arguments: tuple[str, ...] = (), n: int = 5, **scenario: Any
) -> dict[str, Any]:
    """Run the monitor on a scenario; CUDA_... keys go to its environment."""
    settings = {key: scenario.pop(key) for key in list(scenario) if key.startswith("CUDA")}
    path = nvml_stub.write(folder, **scenario)
    output, readings = folder / "m.json", folder / "m.jsonl"
    readings.unlink(missing_ok=True)
    done = nvml_stub.script(
        "monitor_gpu.py", "--interval", "0.12", "--output", str(output), "--quiet", *arguments,
        env=nvml_stub.environment(library, path, **settings),
        until=lambda: readings.is_file() and readings.read_bytes().count(b"\n") >= n,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(output.read_text()))


def test_every_figure_of_a_card_is_read(library: Path, tmp_path: Path) -> None:
    mine = os.getpid()
    # Idle, application clocks, thermal by software and hardware together: counted once.
    heat = {"reasons": 0x1 | 0x2 | 0x8 | 0x20 | 0x40}
    shared = {"compute": mine, "compute_bytes": 7 * 10**9, "graphics": mine, "graphics_bytes": 5}
    record = watch(library, tmp_path, **shared, **heat, n=16)
    assert record["simulated"] is True
    assert record["gpu_name"] == "SIMULATED H100" and record["driver"] == "SIMULATED 580.65"
    assert record["memory_total_bytes"] == 80 * 10**9 and record["power_limit_w"] == 700
    assert record["temperature_limits_c"] == {
        "slowdown": 89.0, "shutdown": 92.0, "max_operating": 85.0,
    }  # fmt: skip
    means = {
        "any_kernel_percent": 95, "tensor_active_percent": 40, "sm_active_percent": 85,
        "power_w": 600, "temperature_c": 60, "sm_clock_mhz": 1755, "memory_clock_mhz": 2619,
        "pcie_tx_bytes_per_s": 100 * 2**20, "pcie_rx_bytes_per_s": 200 * 2**20,
        "memory_used_bytes": 60 * 10**9, "power_all_w": 600,
    }  # fmt: skip
    assert {name: record[name]["mean"] for name in means} == pytest.approx(means)
    # The counter rises by 500 J at each reading.
    assert record["energy_j"] == pytest.approx(500 * (record["n_samples"] - 1))
    assert record["energy_source"] == "counter" and record["energy_all_j"] == record["energy_j"]
    holder = record["processes"][0]
    assert (holder["pid"], holder["memory_used_bytes"]) == (mine, 7 * 10**9)
    assert holder["name"] and len(record["processes"]) == 1
    gpu = {k: v for k, v in record["unavailable"].items() if not k.startswith(("disk", "cpu"))}
    assert gpu == {}
    assert record["throttle_s"].pop("thermal") == pytest.approx(record["wall_s"], abs=0.01)
    assert set(record["throttle_s"].values()) == {0.0}
    assert any("heat held the clocks back" in text for text in record["assessment"])


def test_unsupported_is_null_with_the_drivers_reason(library: Path, tmp_path: Path) -> None:
    failing = dict.fromkeys(("power", "energy", "reasons"), 3)
    fails = {f"fail__{name}": code for name, code in failing.items()}
    record = watch(library, tmp_path, gpm=0, pcie_rx=5000, pcie_tx=7000, **fails)
    for name in ("power_w", "energy_j", "tensor_active_percent", "throttle_s", "power_all_w"):
        assert record[name] is None
        assert "Not Supported" in record["unavailable"][name], name
    assert "Hopper" in record["unavailable"]["sm_active_percent"]
    assert record["any_kernel_percent"]["mean"] == pytest.approx(95)
    # Queried once and never again.
    assert record["n_lost_readings"] == {}
    # The bus is queried directly, and rarely.
    assert record["pcie_rx_bytes_per_s"]["mean"] == pytest.approx(5_000_000)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().split("\n") if line]
    asked = [line["elapsed_s"] for line in lines if "pcie_rx_bytes_per_s" in line]
    assert asked and all(later - one > 4 for one, later in itertools.pairwise(asked))


def test_counters_that_fail_have_a_reason(library: Path, tmp_path: Path) -> None:
    record = watch(library, tmp_path, fail__gpm_metrics=999, fail__gpm_sample__3=10)
    for name in ("tensor_active_percent", "sm_active_percent", "pcie_rx_bytes_per_s"):
        assert record[name] is None
        assert record["unavailable"][name].startswith("every reading failed: NVML: ")
    # If they are denied, the bus can still be queried.
    record = watch(library, tmp_path, fail__gpm_metrics=4, pcie_rx=5000)
    assert record["pcie_rx_bytes_per_s"]["mean"] == pytest.approx(5_000_000)
    assert "Permissions" in record["unavailable"]["tensor_active_percent"]
    assert "Permissions" in record["unavailable"]["sm_active_percent"]
    record = watch(library, tmp_path, gpm__5__code=3)
    assert record["unavailable"]["tensor_active_percent"] == "NVML: Not Supported"
    assert record["sm_active_percent"]["mean"] == pytest.approx(85)


def test_an_instance_of_a_card_in_mig_mode_is_a_card(library: Path, tmp_path: Path) -> None:
    split: dict[str, Any] = {"0__mig": 1, "8__name": "H100 MIG 3g", "8__memory_total": 40 * 10**9}
    split |= {"9__name": "H100 MIG 1g", "9__uuid": "MIG-b"}
    record = watch(library, tmp_path, **split)
    assert (record["gpu_name"], record["memory_total_bytes"]) == ("H100 MIG 3g", 40 * 10**9)
    for setting, name in (("MIG-b", "H100 MIG 1g"), ("MIG-c", None)):
        record = watch(library, tmp_path, CUDA_VISIBLE_DEVICES=setting, **split)
        assert record["gpu_name"] == name
    assert "none of its instances is visible" in record["unavailable"]["power_w"]
    # A card without MIG support is complete, and none of its readings is lost.
    record = watch(library, tmp_path, mig=1, fail__mig=999)
    assert record["gpu_name"] == "SIMULATED H100" and record["n_lost_readings"] == {}


def test_a_transient_error_costs_one_reading(library: Path, tmp_path: Path) -> None:
    # 10: timeout; 3 after an answer is transient too, as the card supported it before.
    record = watch(library, tmp_path, fail__power__2=10, fail__energy__3=10, fail__temperature__4=3)
    assert record["power_w"]["mean"] == pytest.approx(600)
    assert record["n_lost_readings"] == {"energy_j": 1, "power_w": 1, "temperature_c": 1}
    # The energy of the lost reading is in the next difference.
    assert record["energy_j"] == pytest.approx(500 * (record["n_samples"] - 1))


TWO = {
    "count": 2, "0__uuid": "GPU-aaa", "1__uuid": "GPU-bbb", "1__name": "SIMULATED L4",
    "1__power": 100_000, "1__energy_step": 250_000,
}  # fmt: skip


def test_several_cards_are_added_up(library: Path, tmp_path: Path) -> None:
    record = watch(library, tmp_path, **TWO)
    assert (record["gpu_name"], record["n_gpus"]) == ("SIMULATED H100", 2)
    assert [record[key]["mean"] for key in ("power_w", "power_all_w")] == pytest.approx([600, 700])
    assert record["energy_all_j"] == pytest.approx(750 * (record["n_samples"] - 1))
    assert "CUDA numbers them by speed" in record["remarks"][0]
    # Only those assigned to the run.
    record = watch(library, tmp_path, arguments=("--n-gpus", "1"), **TWO)
    assert record["n_gpus"] == 1 and record["power_all_w"]["mean"] == pytest.approx(600)
    assert record["energy_all_j"] == record["energy_j"]


def test_a_card_hidden_from_the_job_is_skipped(library: Path, tmp_path: Path) -> None:
    # A batch system hides the first from this job, which counts its own card from 0, like CUDA.
    kept = {**TWO, "0__fail__handle": 4}
    record = watch(library, tmp_path, CUDA_VISIBLE_DEVICES="0", **kept)
    assert (record["gpu_name"], record["n_gpus"]) == ("SIMULATED L4", 1)
    assert record["remarks"] == []
    for refused, reason in (
        ({"fail__handle": 4}, "NVML: Insufficient Permissions"),
        ({"fail__init": 9}, "no NVIDIA driver on this machine"),
        ({"fail__init": 18}, "version mismatch"),
    ):
        assert reason in watch(library, tmp_path, **refused)["unavailable"]["gpu_name"]


def test_the_probe_describes_the_cards(library: Path, tmp_path: Path) -> None:
    scenario = nvml_stub.write(tmp_path, **{**TWO, "1__cc": 75, "1__name": "NVIDIA L40S"})
    output = tmp_path / "machine.json"
    done = nvml_stub.script(
        "probe_machine.py", "--output", str(output), env=nvml_stub.environment(library, scenario)
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(output.read_text())["gpus"]
    assert (first["compute_capability"], first["supports_bf16"]) == ("9.0", True)
    assert (second["compute_capability"], second["supports_tf32"]) == ("7.5", False)
    assert (first["listed_as"], second["listed_as"]) == (None, "L40S")
    assert first["memory_free_bytes"] == 20 * 10**9
    assert "- index: 0\n  name: SIMULATED H100\n  listed_as: null" in done.stdout


ASK = """
import json, sys, yaml
from expertflow.hardware.probe import least_free_gpu_memory, resolve_gpu
card = resolve_gpu("auto", yaml.safe_load(open(sys.argv[1]))["gpus"])
print(json.dumps([card.name, card.peak_bf16_flops_per_s, card.compute_capability, card.source]))
print(json.dumps(least_free_gpu_memory(2)))
"""


def ask(library: Path, folder: Path, **scenario: Any) -> list[Any]:
    command = [sys.executable, "-c", ASK, str(ROOT / "config" / "hardware" / "gpus.yaml")]
    env = nvml_stub.environment(library, nvml_stub.write(folder, **scenario))
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def test_auto_finds_cards_by_name_and_who_uses_their_memory(library: Path, tmp_path: Path) -> None:
    card, _ = ask(library, tmp_path, name="NVIDIA L40S")
    assert card[:2] == ["L40S", 362e12]
    card, _ = ask(library, tmp_path, name="NVIDIA L40X", cc=91)
    assert card == ["NVIDIA L40X", None, "9.1", "not in config/hardware/gpus.yaml: peaks unknown"]
    used = {"0__memory_used": 0, "1__memory_used": 70 * 10**9}
    holder = {"1__compute": os.getpid(), "1__compute_bytes": 70 * 10**9}
    _, (free, where) = ask(library, tmp_path, **TWO, **used, **holder)
    assert free == 10 * 10**9
    assert where.startswith("GPU 1 has 10.0 GB free; used by ")
    assert f"(pid {os.getpid()}, 70.0 GB)" in where


UUIDS = ["GPU-aa1", "GPU-aa2", "GPU-b"]


def test_the_variable_selects_cards_or_hides_all() -> None:
    """The list ends at an unknown or ambiguous entry."""
    for setting, indexes, reason in (
        (None, (0, 1, 2), None), ("2, 0", (2, 0), None), ("GPU-aa1,2", (0, 2), None),
        ("1,-1,0", (1,), None), ("0,9,1", (0,), None), ("0,GPU-a,1", (0,), None),
        ("", (), HIDDEN), ("NoDevFiles", (), HIDDEN), ("MIG-GPU-aa1/1/0", (), MIG),
    ):  # fmt: skip
        assert visible_gpus(setting, UUIDS) == (indexes, reason)
