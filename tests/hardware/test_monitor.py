import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import SCRIPTS

from expertflow.core.records import to_json
from expertflow.hardware import monitor as monitoring
from expertflow.hardware.monitor import read_samples, summarise
from expertflow.hardware.records import GpuSample


def sample(elapsed_s: float, busy: float | None) -> GpuSample:
    return GpuSample(
        elapsed_s=elapsed_s, utilization_percent=busy, memory_used_bytes=None, temperature_c=None,
        power_w=None, energy_j=None if busy is None else 100 * elapsed_s, cpu_percent=50.0,
        ram_used_bytes=10**9,
    )  # fmt: skip


def test_what_was_not_measured_is_null_with_a_reason() -> None:
    record = summarise([sample(0, None), sample(1, None)], interval_s=1, device=None)
    assert record.any_kernel_percent is None
    assert record.energy_j is None
    assert record.unavailable["any_kernel_percent"] == "no NVIDIA driver on this machine"
    assert record.cpu_percent is not None and record.cpu_percent.mean == 50.0


def test_energy_is_the_difference_of_the_counter() -> None:
    record = summarise([sample(t, 80.0) for t in (1, 2, 5)], interval_s=1, device=None)
    assert record.energy_j == pytest.approx(400)
    assert record.any_kernel_percent is not None
    assert (record.any_kernel_percent.mean, record.assessment) == (80.0, ())


def test_no_energy_is_taken_across_a_pause() -> None:
    first = [sample(t, 80.0) for t in (1, 2)]
    pause = replace(sample(3, 80.0), energy_j=None)
    after = [replace(sample(t, 80.0), energy_j=10.0 * t) for t in (4, 5)]
    record = summarise([*first, pause, *after], interval_s=1, device=None)
    assert record.energy_j == pytest.approx(100 + 10)


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(json.dumps(to_json(sample(1, None))) + '\n{"elapsed_s": 2')
    assert [s.elapsed_s for s in read_samples(path)] == [1]


def test_an_idle_card_is_remarked_upon() -> None:
    record = summarise([sample(t, 8.0) for t in range(5)], interval_s=1, device=None)
    assert "some kernel was running 8 % of the time" in record.assessment[0]


def test_a_resumed_run_goes_on_with_its_samples(tmp_path: Path) -> None:
    output = tmp_path / "gpu.jsonl"
    for offset in (0.0, 100.0):
        count = itertools.count()
        monitoring.monitor(
            output,
            interval_s=0.01,
            duration_s=None,
            offset_s=offset,
            stop=lambda count=count: next(count) > 40,
        )
    times = [s.elapsed_s for s in read_samples(output)]
    assert times == sorted(times)
    assert times[0] < 1 and times[-1] > 100


def test_the_script_runs_beside_anything_and_exits_0_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "m.json"
    command = [sys.executable, str(SCRIPTS / "monitor_gpu.py"), "--duration", "0.5"]
    command += ["--interval", "0.1", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    record = json.loads(output.read_text())
    assert json.loads(done.stdout) == record
    assert record["n_samples"] >= 3
    assert record["ram_used_bytes"]["max"] > 0
