"""Readings stand for time, files for all that was read, and nothing is written over."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import SCRIPTS

from expertflow.core import cli
from expertflow.core.records import to_json, write_record
from expertflow.hardware import monitor as monitoring
from expertflow.hardware import sampler
from expertflow.hardware.card import Card
from expertflow.hardware.monitor import monitor, read_samples
from expertflow.hardware.pace import Pace
from expertflow.hardware.records import GpuSample
from expertflow.hardware.summary import stats, summarise

CARD = Card(gpu_name="SIMULATED", n_gpus=1, simulated=True)


def sample(elapsed_s: float, busy: float, *, starts: bool = False) -> GpuSample:
    return GpuSample(
        elapsed_s=elapsed_s, utilization_percent=busy, memory_used_bytes=None, temperature_c=None,
        power_w=None, energy_j=None, cpu_percent=None, ram_used_bytes=1, starts=starts,
    )  # fmt: skip


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "monitor_gpu.py"), "--quiet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_reading_counts_for_its_time_whatever_the_pace() -> None:
    # 90 s idle at ten a second, 600 s busy at one: by readings it would be 40 %.
    idle = [sample(t / 10, 0.0, starts=t == 0) for t in range(901)]
    busy = [sample(90.0 + t, 100.0) for t in range(1, 601)]
    record = summarise([*idle, *busy], card=CARD, pace=Pace())
    known = record.any_kernel_percent
    assert known is not None and known.mean == pytest.approx(100 * 600 / 690)
    assert (known.min, known.p5, known.p50, known.max) == (0.0, 0.0, 100.0, 100.0)
    assert record.assessment == ()
    assert record.effective_interval_s == pytest.approx(0.1)


def test_a_value_stands_for_the_time_since_the_one_before() -> None:
    readings: list[tuple[float, bool, float | None]] = [
        (0.0, True, None), (1.0, False, 10.0), (2.0, False, None), (4.0, False, 20.0),
        # A pause: its first reading stands for no time.
        (100.0, True, 90.0), (101.0, False, 30.0),
    ]  # fmt: skip
    known = stats(readings)
    assert known is not None
    assert known.mean == pytest.approx((10 * 1 + 20 * 3 + 30 * 1) / 5)
    assert (known.p50, known.max) == (20.0, 90.0)
    alone = stats([(5.0, True, 7.0)])
    assert alone is not None and (alone.mean, alone.p50) == (7.0, 7.0)


@pytest.mark.parametrize(("before", "after"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST",) * 2])
def test_scripts_count_cards_as_the_driver_does(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    # Set first, so that it is put back.
    monkeypatch.setenv("CUDA_DEVICE_ORDER", before or "")
    if before is None:
        del os.environ["CUDA_DEVICE_ORDER"]
    for by_bus in (False, True):
        with pytest.raises(SystemExit):
            cli.run(lambda: None, by_bus=by_bus)
        assert os.environ.get("CUDA_DEVICE_ORDER") == (after if by_bus else before)


def test_the_interval_found_is_a_true_median() -> None:
    record = summarise([sample(t, 1.0) for t in (0, 1, 3)], card=CARD, pace=Pace())
    assert record.effective_interval_s == 1.5


def test_a_line_that_was_cut_takes_no_later_reading_with_it(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(json.dumps(to_json(sample(1, 5.0, starts=True))) + '\n{"elapsed_s": 2')
    monitor(
        path, pace=Pace(), duration_s=0, zero_s=None, goes_on=True, stop=lambda: True
    )  # fmt: skip
    assert [s.starts for s in read_samples(path)] == [True, True]


def test_a_replay_keeps_the_pace_of_the_record(tmp_path: Path) -> None:
    trace, facts = tmp_path / "t.jsonl", tmp_path / "t.json"
    trace.write_text(json.dumps(to_json(sample(1, 5.0))))
    first = summarise([sample(1, 5.0)], card=CARD, pace=Pace(epoch_s=1.0))
    for record in (first, replace(first, configured_interval_s=0.5, epoch_s=None)):
        write_record(facts, record)
        again = monitoring.replay(trace, facts)
        assert again.configured_interval_s == record.configured_interval_s
        assert again.epoch_s == record.epoch_s


def test_it_leaves_the_files_alone_where_its_parent_is_another(tmp_path: Path) -> None:
    output, samples = tmp_path / "m.json", tmp_path / "m.jsonl"
    samples.write_text("of the session that goes on")
    done = script("--output", output, "--with-parent", os.getppid())
    assert done.returncode == 1 and "has ended" in done.stderr
    assert samples.read_text() == "of the session that goes on"
    assert not output.exists()


def test_the_readings_are_not_written_over(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("kept")
    for arguments in (["--replay", trace], ["--duration", "0"]):
        done = script("--output", tmp_path / "." / "t.jsonl", *arguments)
        assert done.returncode == 2 and "where the readings are" in done.stderr
    assert trace.read_text() == "kept"


def test_volumes_over_disks_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sda/device", "cciss!c0d0/device", "dm-0/slaves", "loop0"):
        (tmp_path / name).mkdir(parents=True)
    names = ("sda", "sda1", "cciss/c0d0", "dm-0", "loop0")

    def counters(*, perdisk: bool) -> dict[str, Any]:
        assert perdisk
        return {name: SimpleNamespace(read_bytes=10, write_bytes=3) for name in names}

    monkeypatch.setattr(sampler.psutil, "disk_io_counters", counters)
    assert sampler.disk_counters(tmp_path) == (20, 6)
    assert sampler.disk_counters(tmp_path / "none") is None

    def refuse(*, perdisk: bool) -> dict[str, Any]:
        raise NotImplementedError

    monkeypatch.setattr(sampler.psutil, "disk_io_counters", refuse)
    assert sampler.disk_counters(tmp_path) is None
