"""Killed at any point of a step or of a checkpoint, a run ends with the very same weights."""

import random
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from soak import Straight, assert_same, kill_until_done
from trainers import Fault, Trainers

KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
EIGHT_BIT = pytest.mark.extra("bitsandbytes")
# Points between which what is on the disk differs, and how often a run comes there first.
POINTS = {
    "enter:data_wait": 1, "exit:backward": 7, "enter:eval": 2, "exit:eval": 2,
    "enter:checkpoint": 2, "exit:take": 2, "enter:save_file": 1, "exit:save_file": 5,
    "enter:sync_directory": 2, "exit:sync_directory": 3, "enter:hide": 1, "exit:hide": 1,
    "exit:prune": 2, "enter:export": 1, "exit:candidate": 1, "exit:export": 1, "enter:publish": 1,
    "exit:publish": 1,
}  # fmt: skip
OfMethod = Callable[[str], Straight]


@pytest.fixture(scope="module")
def straight(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> OfMethod:
    return cache(lambda method: Straight(trainers, tmp_path_factory.mktemp(method), method))


def stopped_and_resumed(
    trainers: Trainers, straight: Straight, folder: Path, *faults: Fault
) -> dict[str, Any]:
    shutil.copytree(straight.inputs, folder, dirs_exist_ok=True)
    for fault in faults:
        died = trainers.train(folder, fault)
        assert died["fired"], f"{fault} was never reached"
        code = -KILL if fault[2] == KILL else 143
        # Told to stop while its last checkpoint is written, a run may be at its end already.
        is_done = fault[2] != KILL and died["code"] == 0 and (folder / "training.json").is_file()
        assert died["code"] == code or is_done, (folder / "log").read_text()
    record = trainers.finish(folder)
    assert_same(folder, record, straight.record)
    return record


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    trainers: Trainers, straight: OfMethod, tmp_path: Path
) -> None:
    # The checkpoint of step 5 is on disk before the one of step 10 is taken.
    fault = ("exit:optimizer", 11, KILL)
    record = stopped_and_resumed(trainers, straight("lora"), tmp_path, fault)
    assert record["resumed_at_steps"] in ([5], [10])
    time_ = record["time"]
    parts = ("startup_s", "data_wait_s", "train_s", "checkpoint_s", "eval_s", "other_s")
    assert sum(time_[part] for part in parts) == pytest.approx(time_["wall_s"], rel=0.01)
    assert all(time_[part] >= 0 for part in parts)
    assert 0 < time_["forward_s"] + time_["backward_s"] < time_["train_s"]


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point(
    trainers: Trainers, straight: OfMethod, tmp_path: Path, point: str
) -> None:
    stopped_and_resumed(trainers, straight("lora"), tmp_path, (point, POINTS[point], KILL))


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        ("enter:data_wait", 2, TERM), ("exit:forward", 6, INT), ("enter:optimizer", 13, HUP),
        ("enter:take", 2, INT), ("exit:save_file", 3, TERM), ("enter:prune", 2, TERM),
        ("enter:eval", 2, INT),
    ],
)  # fmt: skip
def test_told_to_stop_at_any_point(
    trainers: Trainers, straight: OfMethod, tmp_path: Path, fault: Fault
) -> None:
    stopped_and_resumed(trainers, straight("lora"), tmp_path, fault)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        "full", "dora", "accumulation", "checkpointing",
        pytest.param("adamw_8bit", marks=EIGHT_BIT), pytest.param("qlora", marks=EIGHT_BIT),
    ],
)  # fmt: skip
def test_every_method(trainers: Trainers, straight: OfMethod, tmp_path: Path, method: str) -> None:
    faults = [("exit:backward", 7, KILL), ("enter:optimizer", 2, TERM), ("exit:sync", 2, KILL)]
    stopped_and_resumed(trainers, straight(method), tmp_path, *faults)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments(
    trainers: Trainers, straight: OfMethod, tmp_path: Path, seed: int
) -> None:
    """Rounds of ``make soak``."""
    generator = random.Random(seed)
    method = generator.choice(["lora", "full", "accumulation"])
    kill_until_done(trainers, straight(method), tmp_path, generator)
