"""Timers stop what costs money for nothing, and leave alone what works or cannot be judged."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from guarded import end, record, run, start_trainer, trainer
from support import ROOT, wait_for

from expertflow.core.process import kill_group
from expertflow.rental.guard import timers

sys.path.append(str(ROOT / "tests" / "hardware"))

import nvml_stub

SHORT = ("--idle-minutes", "0.05")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def driver(library: Path, folder: Path, **card: object) -> dict[str, str]:
    return nvml_stub.environment(library, nvml_stub.write(folder, **card))


def test_idle_cards_end_a_run(library: Path, tmp_path: Path) -> None:
    env = driver(library, tmp_path, utilization=90)
    guard = start_trainer(tmp_path, *SHORT, command=trainer(tmp_path), env=env)
    nvml_stub.write(tmp_path, utilization=0)
    code, out = end(guard)
    assert code == 81, out
    assert (tmp_path / "saved.txt").is_file()
    found = record(tmp_path)
    assert found["outcome"] == "idle" and found["idle_timer"].startswith("on: 1 cards")


def test_one_busy_card_of_several_is_enough(library: Path, tmp_path: Path) -> None:
    env = driver(library, tmp_path, utilization=0, count=2, **{"1__utilization": 90})
    code, out = run(tmp_path, *SHORT, command=trainer(tmp_path, n_steps=300), env=env)
    assert code == 0, out


def test_no_card_no_timer_and_it_is_said(tmp_path: Path) -> None:
    env = {"NVML_SCENARIO": "", "LD_LIBRARY_PATH": ""}
    code, out = run(tmp_path, *SHORT, command=["true"], env=env)
    if "idle timer on" in out:
        pytest.skip("there is a card here")
    assert code == 0 and "idle timer off: no NVIDIA driver" in out
    assert record(tmp_path)["idle_timer"].startswith("off: ")


def test_a_card_that_does_not_tell_is_not_judged(library: Path, tmp_path: Path) -> None:
    env = driver(library, tmp_path, fail__utilization=3)
    code, out = run(tmp_path, *SHORT, command=trainer(tmp_path, n_steps=300), env=env)
    assert code == 0 and "stopped telling" in out


def test_a_standstill_ends_a_run(tmp_path: Path) -> None:
    code, out = run(tmp_path, "--stalled-minutes", "0.05", command=["sleep", "3600"])
    assert code == 82, out
    assert record(tmp_path)["outcome"] == "stalled"


@pytest.mark.parametrize(
    ("written", "work", "is_alive"),
    [
        ("steps.jsonl", "sleep 3600", True),
        ("", "while :; do :; done", True),
        # A monitor's readings are no sign of life.
        ("gpu.jsonl", "sleep 3600", False),
    ],
    ids=["files", "processors", "watched"],
)
def test_work_is_no_standstill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, work: str, is_alive: bool
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    process = subprocess.Popen(["bash", "-c", f"({work}) & wait"], start_new_session=True)
    timer = timers.Standstill(minutes=0.1, folders=[tmp_path], pid=process.pid)

    def used_s() -> float:
        children = psutil.Process(process.pid).children(recursive=True)
        return sum(child.cpu_times().user for child in children)

    try:
        found = []
        for look in range(30):
            clock.now_s += 0.5
            before_s = used_s()
            if written:
                (tmp_path / written).write_text(" " * look)
            else:
                wait_for(lambda before_s=before_s: used_s() > before_s + 0.02)
            found.append(timer.poll())
    finally:
        kill_group(process)
    assert any(found) is not is_alive
