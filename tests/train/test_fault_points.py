"""Killed at any point of a step or of a checkpoint, a run ends with the very same weights."""

import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import LORA, write_tiny_run
from trainers import Fault, Trainers

pytestmark = pytest.mark.long

N_STEPS = 20
KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
EIGHT_BIT = pytest.mark.extra("bitsandbytes")
# Points between which what is on the disk differs, and how often a run comes there first.
POINTS = {
    "enter:data_wait": 1, "exit:backward": 7, "exit:optimizer": 10, "enter:eval": 2, "exit:eval": 2,
    "enter:checkpoint": 2, "exit:take": 2, "enter:save_file": 1, "exit:save_file": 5,
    "enter:sync_directory": 2, "exit:sync_directory": 3, "enter:hide": 1, "exit:hide": 1,
    "exit:prune": 2, "enter:export": 1, "exit:candidate": 1, "exit:export": 1, "enter:publish": 1,
    "exit:publish": 1,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "dora": {"lora": replace(LORA, use_dora=True)},
    "accumulation": {"lora": LORA, "batch_size": 2, "gradient_accumulation_steps": 3},
    "checkpointing": {"lora": LORA, "gradient_checkpointing": True},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "qlora": {"lora": LORA, "method": "qlora"},
}


Straight = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def straight(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return what a method's runs begin with, and the record of one that is never stopped."""

    @cache
    def run(method: str) -> tuple[Path, dict[str, Any]]:
        inputs = tmp_path_factory.mktemp(method)
        write_tiny_run(inputs, n_steps=N_STEPS, **METHODS[method])
        folder = shutil.copytree(inputs, tmp_path_factory.mktemp("straight") / method)
        return inputs, trainers.finish(folder)

    return run


def assert_same(folder: Path, record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert record["weights_sha256"] == expected["weights_sha256"]
    for key in ("n_tokens", "n_target_tokens", "n_padding_tokens", "loss_first", "loss_last"):
        assert record[key] == expected[key], key
    losses = [point["loss"] for point in record["eval_points"]]
    assert losses == [point["loss"] for point in expected["eval_points"]]
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").open()]
    assert steps == list(range(1, N_STEPS + 1))
    assert not list(folder.glob("state/**/.*")), "nothing half written is left"


def stopped_and_resumed(
    trainers: Trainers, straight: Straight, folder: Path, method: str, *faults: Fault
) -> None:
    inputs, expected = straight(method)
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    for fault in faults:
        died = trainers.train(folder, fault)
        assert died["fired"], f"{fault} was never reached"
        code = -KILL if fault[2] == KILL else 143
        # Told to stop while its last checkpoint is written, a run may be at its end already.
        is_done = fault[2] != KILL and died["code"] == 0 and (folder / "training.json").is_file()
        assert died["code"] == code or is_done, (folder / "log").read_text()
    assert_same(folder, trainers.finish(folder), expected)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point(
    trainers: Trainers, straight: Straight, tmp_path: Path, point: str
) -> None:
    stopped_and_resumed(trainers, straight, tmp_path, "lora", (point, POINTS[point], KILL))


@pytest.mark.parametrize(
    "fault",
    [
        ("enter:data_wait", 2, TERM), ("exit:forward", 6, INT), ("enter:optimizer", 13, HUP),
        ("enter:take", 2, INT), ("exit:save_file", 3, TERM), ("enter:prune", 2, TERM),
        ("enter:eval", 2, INT),
    ],
)  # fmt: skip
def test_told_to_stop_at_any_point(
    trainers: Trainers, straight: Straight, tmp_path: Path, fault: Fault
) -> None:
    stopped_and_resumed(trainers, straight, tmp_path, "lora", fault)


@pytest.mark.parametrize(
    "method",
    [
        "full", "dora", "accumulation", "checkpointing",
        pytest.param("adamw_8bit", marks=EIGHT_BIT), pytest.param("qlora", marks=EIGHT_BIT),
    ],
)  # fmt: skip
def test_every_method(trainers: Trainers, straight: Straight, tmp_path: Path, method: str) -> None:
    faults = [("exit:backward", 7, KILL), ("enter:optimizer", 2, TERM), ("exit:sync", 2, KILL)]
    stopped_and_resumed(trainers, straight, tmp_path, method, *faults)
