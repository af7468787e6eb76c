"""Timers stop what costs money for nothing, and leave alone what works or cannot be judged."""

import sys
from pathlib import Path

import pytest
from guarded import end, record, run, start, start_trainer, trainer
from support import ROOT

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
    code, out = run(tmp_path, *SHORT, command=trainer(tmp_path, n_steps=300), **env)
    assert code == 0, out


def test_no_card_no_timer_and_it_is_said(tmp_path: Path) -> None:
    work = trainer(tmp_path, n_steps=200)
    code, out = run(tmp_path, *SHORT, command=work, NVML_SCENARIO="", LD_LIBRARY_PATH="")
    if "idle timer on" in out:
        pytest.skip("there is a card here")
    assert code == 0 and "idle timer off: no NVIDIA driver" in out
    assert record(tmp_path)["idle_timer"].startswith("off: ")


def test_the_idle_timer_can_be_turned_off(library: Path, tmp_path: Path) -> None:
    env = driver(library, tmp_path, utilization=0)
    command = trainer(tmp_path, n_steps=200)
    code, out = run(tmp_path, "--idle-minutes", "0", command=command, **env)
    assert code == 0 and "idle timer off: --idle-minutes 0" in out


def test_a_card_that_does_not_tell_is_not_judged(library: Path, tmp_path: Path) -> None:
    env = driver(library, tmp_path, fail__utilization=3)
    code, out = run(tmp_path, *SHORT, command=trainer(tmp_path, n_steps=300), **env)
    assert code == 0 and "stopped telling" in out


WATCHER = """
import time
from pathlib import Path

folder = Path("state/a/b")
folder.mkdir(parents=True)
while True:
    with (folder / "gpu.jsonl").open("a") as stream:
        stream.write("{}")
    time.sleep(0.5)
"""


def test_a_standstill_ends_a_run(tmp_path: Path) -> None:
    # A monitor's readings are no sign of life.
    command = [sys.executable, "-c", WATCHER]
    guard = start(tmp_path, "--stalled-minutes", "0.05", command=command)
    code, out = end(guard)
    assert code == 82, out
    assert record(tmp_path)["outcome"] == "stalled"


# Twice as long as a standstill may last; a full disk's queue may hold a file up for seconds.
@pytest.mark.parametrize(
    ("minutes", "work"),
    [
        ("0.1", "for i in $(seq 24); do sleep 0.5; echo >> results/steps.jsonl; done"),
        ("0.05", "end=$((SECONDS + 6)); while [ $SECONDS -lt $end ]; do :; done"),
    ],
    ids=["files", "processors"],
)
def test_work_is_no_standstill(tmp_path: Path, minutes: str, work: str) -> None:
    (tmp_path / "results").mkdir()
    code, out = run(tmp_path, "--stalled-minutes", minutes, command=["bash", "-c", work])
    assert code == 0, out


def test_a_command_that_asks_for_notices_may_hang(tmp_path: Path) -> None:
    guard = start_trainer(tmp_path, "--notice-command", "sleep 3600")
    guard.terminate()
    code, out = end(guard)
    assert code == 143, out
