import fcntl
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from support import SCRIPTS, run_script, wait_for

from expertflow.core import cli
from expertflow.core.errors import DataError
from expertflow.core.records import to_json
from expertflow.hardware import monitor as monitoring
from expertflow.hardware.monitor import SamplingInterval, disk_counters, read_samples
from expertflow.hardware.nvml import NO_DRIVER
from expertflow.hardware.records import Card, GpuSample, MonitorRecord
from expertflow.hardware.show import print_record
from expertflow.hardware.summary import compute_stats, no_card
from expertflow.hardware.summary import summarize as summarize_card
from expertflow.report.inputs import read_lines

TRACE = Path(__file__).parent / "data" / "trace.jsonl"
H100 = Card(
    gpu_name="SIMULATED H100", memory_total_bytes=80 * 10**9, power_limit_w=700.0, n_gpus=1,
    temperature_limits_c={"slowdown": 89.0, "max_operating": 85.0},
)  # fmt: skip


def sample(elapsed_s: float, busy: float | None, **figures: Any) -> GpuSample:
    given = {
        "elapsed_s": elapsed_s, "utilization_percent": busy, "memory_used_bytes": None,
        "temperature_c": None, "power_w": None,
        "energy_j": None if busy is None else 100 * elapsed_s, "cpu_percent": 50.0,
        "ram_used_bytes": 10**9,
    }  # fmt: skip
    return GpuSample(**{**given, **figures})


def summarize(samples: list[GpuSample], card: Card | None = None) -> MonitorRecord:
    return summarize_card(samples, card=card or no_card(NO_DRIVER), configured_s=1.0)


def remarks(busy: float = 95, n: int = 20, **figures: Any) -> str:
    return " | ".join(summarize([sample(t, busy, **figures) for t in range(n)], H100).assessment)


def test_every_null_figure_has_a_reason() -> None:
    may_be_null = {"configured_interval_s"}
    for samples in ([], [sample(0, None)], [sample(0, 1), sample(1, 1)]):
        record = summarize(samples, H100 if samples and samples[0].energy_j is not None else None)
        nulls = {name for name, value in to_json(record).items() if value is None}
        assert nulls - may_be_null - {"driver"} <= record.unavailable.keys()
        assert not {name for name in record.unavailable if name not in nulls}
    record = summarize([sample(0, None), sample(1, None)])
    assert record.unavailable["any_kernel_percent"] == "no NVIDIA driver on this machine"
    assert record.cpu_percent is not None and record.cpu_percent.mean == 50.0


def test_a_lost_reading_loses_no_energy_and_a_reset_counter_adds_none() -> None:
    readings = [0.0, None, 50.0, 5.0, 15.0]
    record = summarize([sample(t, 1.0, energy_j=value) for t, value in enumerate(readings)])
    assert (record.energy_j, record.energy_source) == (pytest.approx(50 + 10), "counter")


def test_figures_are_assessed() -> None:
    """Heat is judged by the card's own limits, a cool card is not a fault."""
    for figures, message in (
        ({"busy": 8.0, "n": 10}, "no kernel at all was running"),
        ({"busy": 8.0, "n": 9}, None),  # few samples prove nothing
        ({"memory_used_bytes": 79 * 10**9}, "memory was 99 % full"),
        ({"temperature_c": 84.0}, "reached 84 °C and its limit (max operating) is 85 °C"),
        ({"temperature_c": 35.0}, None),
    ):
        text = remarks(**figures)
        assert text == "" if message is None else message in text


def test_throttling_by_heat_counts_from_one_percent() -> None:
    hot, cool = ("hw_slowdown", "hw_thermal"), ("gpu_idle", "application_clocks")
    for n_hot in (2, 3):
        reasons = [hot if 0 < t <= n_hot else cool for t in range(201)]
        record = summarize([sample(t, 95.0, throttle_reasons=r) for t, r in enumerate(reasons)])
        assert record.throttle_s is not None
        assert (record.throttle_s["thermal"], record.throttle_s["hw_slowdown"]) == (n_hot, 0)
        message = "heat held the clocks back 1.5 % of the time"
        assert [message in text for text in record.assessment] == [True] * (n_hot == 3)


def test_a_recorded_trace_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = summarize(read_samples(TRACE), H100)
    print_record(record)
    assert record.simulated and "SIMULATED" in capsys.readouterr().out
    assert (record.gpu_name, record.n_samples) == ("SIMULATED H100", 60)
    # 20 s of 200 J, then the 39 gaps of two stretches at 600 W, minus the gap between them.
    assert record.energy_j == pytest.approx(20 * 200 + 38 * 600)
    assert record.wall_s == pytest.approx(39 + 19)
    assert record.throttle_s is not None and record.throttle_s["thermal"] == pytest.approx(3)
    assert "heat held the clocks back" in " ".join(record.assessment)
    spoilt = tmp_path / "x.jsonl"
    spoilt.write_text('{"a": 1}')
    with pytest.raises(DataError, match="not a reading of the"):
        read_samples(spoilt)


def test_a_resumed_run_continues_its_samples(tmp_path: Path) -> None:
    output = tmp_path / "gpu.jsonl"
    for seen_s in (0.0, 100.0):
        count = itertools.count()
        record = monitoring.monitor_machine(
            output, interval=SamplingInterval(0.01), zero_s=time.time() - seen_s,
            goes_on=seen_s > 0, stop=lambda count=count: next(count) > 40,
        )  # fmt: skip
    samples = read_samples(output)
    times = [s.elapsed_s for s in samples]
    assert times == sorted(times)
    assert times[0] < 50 and times[-1] > 100
    assert sum(s.starts for s in samples) == 2
    assert record.wall_s is not None and record.wall_s < 50
    assert record.monitor_cpu_fraction is not None and record.monitor_cpu_fraction > 0


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    output, readings = tmp_path / "m.json", tmp_path / "m.jsonl"
    command = [sys.executable, str(SCRIPTS / "monitor_gpu.py"), "--quiet", "--interval", "0.05"]
    command += ["--output", str(output), "--with-parent"]
    started = (
        "import os, subprocess, signal;"
        f" subprocess.Popen([*{command!r}, str(os.getpid())]); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", started])
    wait_for(lambda: readings.is_file() and readings.stat().st_size, during=parent)
    parent.kill()
    parent.wait()
    wait_for(output.is_file, message="the monitor did not end")
    assert json.loads(output.read_text())["n_samples"] >= 1


def test_a_value_covers_the_time_since_the_previous_one() -> None:
    known = compute_stats(
        [
            sample(0, None, starts=True), sample(1, 10.0), sample(2, None), sample(4, 20.0),
            # A pause: its first reading stands for no time.
            sample(100, 90.0, starts=True), sample(101, 30.0),
        ],
        "utilization_percent",
    )  # fmt: skip
    assert known is not None
    assert known.mean == pytest.approx((10 * 1 + 20 * 3 + 30 * 1) / 5)
    assert (known.p50, known.max) == (20.0, 90.0)
    # 90 s idle at ten a second, 600 s busy at one: by readings it would be 40 %.
    idle = [sample(t / 10, 0.0, starts=t == 0) for t in range(901)]
    record = summarize([*idle, *(sample(90.0 + t, 100.0) for t in range(1, 601))], H100)
    known = record.any_kernel_percent
    assert known is not None and known.mean == pytest.approx(100 * 600 / 690)
    assert (known.min, known.p50, known.max) == (0.0, 100.0, 100.0)
    assert record.assessment == () and record.effective_interval_s == pytest.approx(0.1)
    alone = compute_stats([sample(5, 7.0, starts=True)], "utilization_percent")
    assert alone is not None and (alone.mean, alone.p50) == (7.0, 7.0)


def test_scripts_count_cards_as_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_ORDER"
    # Set first, so that it is restored.
    monkeypatch.setenv(name, "FASTEST_FIRST")
    for before, by_bus, after in (
        ("FASTEST_FIRST", True, "FASTEST_FIRST"), (None, False, None), (None, True, "PCI_BUS_ID"),
    ):  # fmt: skip
        if before is None:
            os.environ.pop(name, None)
        with pytest.raises(SystemExit):
            cli.run(lambda: None, by_bus=by_bus)
        assert os.environ.get(name) == after


def test_a_truncated_line_does_not_lose_later_readings(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    full = sample(
        1, 2.0, throttle_reasons=("sw_thermal",), lost={"power_w": "Timeout"}, starts=True
    )
    # Missing figures of a reading are omitted.
    assert "sm_clock_mhz" not in msgspec.to_builtins(full)
    path.write_text(json.dumps(msgspec.to_builtins(full)) + '\n{"elapsed_s": 2')
    assert read_samples(path) == [full]
    interval = SamplingInterval()
    monitoring.monitor_machine(path, interval=interval, goes_on=True, stop=lambda: True)
    assert [s.starts for s in read_samples(path)] == [True, True]
    # The report reads every line.
    assert len(read_lines(GpuSample, path)) == 2
    path.write_bytes(path.read_bytes() + bytes(9))
    monitoring.write_missing_record(tmp_path / "m.json", path, configured_s=None, reason="killed")
    assert len(read_lines(GpuSample, path)) == 2


def test_readings_of_others_are_not_overwritten(tmp_path: Path) -> None:
    output, readings = tmp_path / "m.json", tmp_path / "m.jsonl"
    readings.write_text("of the session that goes on")
    for code, message, arguments in (
        (1, "has ended", ("--output", output, "--with-parent", os.getppid())),
        (2, "the file of readings", ("--output", tmp_path / "." / "m.jsonl", "--duration", "0")),
        (2, "--output is missing", ("--duration", "1")),
        (2, "is nan; set it to seconds", ("--output", output, "--interval", "nan")),
    ):
        done = run_script("monitor_gpu", "--quiet", *arguments)
        assert done.returncode == code and message in done.stderr
    assert readings.read_text() == "of the session that goes on"
    assert not output.exists()


def test_volumes_are_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sda/device", "cciss!c0d0/device", "dm-0/slaves", "loop0"):
        (tmp_path / name).mkdir(parents=True)
    counted = SimpleNamespace(read_bytes=10, write_bytes=3)
    disks = dict.fromkeys(("sda", "sda1", "cciss/c0d0", "dm-0", "loop0"), counted)
    monkeypatch.setattr(monitoring.psutil, "disk_io_counters", lambda perdisk: disks)
    assert disk_counters(tmp_path) == (20, 6)
    assert disk_counters(tmp_path / "none") is None
    monkeypatch.setattr(
        monitoring.psutil, "disk_io_counters", Mock(side_effect=NotImplementedError)
    )
    assert disk_counters(tmp_path) is None


def test_a_monitor_waits_for_another(tmp_path: Path) -> None:
    output, readings = tmp_path / "m.json", tmp_path / "state" / "m.jsonl"
    readings.parent.mkdir()
    command = [sys.executable, str(SCRIPTS / "monitor_gpu.py"), "--duration", "0", "--quiet"]
    command += ["--output", str(output), "--samples", str(readings)]
    with readings.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as monitor:
            assert monitor.stderr is not None
            message = f"{readings}: waiting for another monitor, which is still writing"
            assert message in monitor.stderr.readline()
            fcntl.flock(other, fcntl.LOCK_UN)
    assert monitor.returncode == 0 and json.loads(output.read_text())["n_samples"] == 1
    # Asked to stop, another one waits no longer.
    with readings.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as monitor:
            assert monitor.stderr is not None and message in monitor.stderr.readline()
            monitor.terminate()
    assert monitor.returncode != 0


def log(path: Path, step_s: float, n: int, *, every: int = 1) -> Path:
    """Write a trainer's log, one line every few steps, after ten seconds of start-up."""
    steps = range(every, n * every + 1, every)
    lines = [json.dumps({"step": s, "elapsed_s": 10 + s * step_s, "loss": 1.0}) for s in steps]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_it_reads_densely_until_it_knows_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    interval = SamplingInterval(steps=path, n_steps_per_epoch=10)
    assert interval.next_s() == 0.1
    log(path, 0.5, 1)
    assert (interval.next_s(), interval.epoch_s) == (0.1, None)
    log(path, 0.5, 10)
    assert interval.next_s() < 5 / 20
    # A pause for an evaluation does not make steps longer.
    late = [{"step": s, "elapsed_s": 100 + s * 0.5} for s in range(11, 16)]
    with path.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in late)
        stream.write('{"step": 16, "elap')
    interval.next_s()
    assert interval.epoch_s == pytest.approx(5)
    # An epoch gets twenty readings, within bounds.
    assert SamplingInterval().next_s() == 1.0
    for step_s, n_steps, every, least, most in (
        (1.0, 1000, 1, 1.0, 1.0), (0.6, 10, 1, 0.2, 0.3), (0.01, 5, 1, 0.1, 0.1),
        # Logging intervals work as well as steps.
        (0.5, 10, 10, 0.2, 0.25),
    ):  # fmt: skip
        path = log(tmp_path / "steps.jsonl", step_s, 30, every=every)
        interval = SamplingInterval(steps=path, n_steps_per_epoch=n_steps)
        assert least <= interval.next_s() <= most
        assert SamplingInterval(5.0, steps=path, n_steps_per_epoch=n_steps).next_s() == 5.0
