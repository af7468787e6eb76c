"""Killed at any point of a step or of a checkpoint, a run ends with the very same weights."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import LORA, ROOT, SCRIPTS, write_tiny_run

N_STEPS = 20
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
STEP_POINTS = [
    f"{edge}:{part}"
    for part in ("data_wait", "h2d", "forward", "backward", "optimizer", "eval", "checkpoint")
    for edge in ("enter", "exit")
]
# How often a run of 20 steps comes there at least.
CHECKPOINT_POINTS = {
    "enter:take": 3, "exit:take": 3, "enter:save_file": 6, "exit:save_file": 6, "enter:sync": 3,
    "exit:sync": 3, "enter:sync_directory": 3, "exit:sync_directory": 3, "enter:prune": 3,
    "enter:hide": 1, "exit:hide": 1, "exit:prune": 3,
}  # fmt: skip
END_POINTS = ["enter:export", "exit:candidate", "exit:export", "enter:publish", "exit:publish"]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "dora": {"lora": replace(LORA, use_dora=True)},
    "accumulation": {"lora": LORA, "batch_size": 2, "gradient_accumulation_steps": 3},
    "checkpointing": {"lora": LORA, "gradient_checkpointing": True},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "qlora": {"lora": LORA, "method": "qlora"},
}


class Trainers:
    def __init__(self) -> None:
        paths = f"{SCRIPTS}:{ROOT / 'tests'}"
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fault_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def train(self, folder: Path, fault: tuple[str, int, int] | None = None) -> dict[str, Any]:
        return self.ask(folder, fault=fault)

    def ask(self, folder: Path, **request: Any) -> dict[str, Any]:
        assert self._server.stdin and self._server.stdout
        request = {"folder": str(folder), "fault": None, **request}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def finish(self, folder: Path) -> dict[str, Any]:
        assert self.train(folder) == {"code": 0, "fired": False}, (folder / "log").read_text()
        record: dict[str, Any] = json.loads((folder / "training.json").read_text())
        return record

    def close(self) -> None:
        self._server.communicate(timeout=180)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def runs(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(method: str) -> tuple[Path, dict[str, Any]]:
        if method not in made:
            if METHODS[method].get("method") == "qlora" or method == "adamw_8bit":
                pytest.importorskip("bitsandbytes")
            folder = tmp_path_factory.mktemp(method)
            write_tiny_run(folder, n_steps=N_STEPS, **METHODS[method])
            inputs = tmp_path_factory.mktemp("inputs") / method
            shutil.copytree(folder, inputs)
            made[method] = inputs, trainers.finish(folder)
        return made[method]

    return {"of": run}


def killed_and_resumed(
    trainers: Trainers, runs: dict[str, Any], folder: Path, method: str, fault: tuple[str, int, int]
) -> None:
    inputs, straight = runs["of"](method)
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    died = trainers.train(folder, fault)
    assert died["fired"], f"{fault} was never reached"
    expected = -KILL if fault[2] == KILL else 143
    # Told to stop while its last checkpoint is written, a run may be at its end already.
    is_done = fault[2] != KILL and died["code"] == 0 and (folder / "training.json").is_file()
    assert died["code"] == expected or is_done, (folder / "log").read_text()
    record = trainers.finish(folder)
    assert record["weights_sha256"] == straight["weights_sha256"]
    for key in ("n_tokens", "n_target_tokens", "n_padding_tokens", "loss_first", "loss_last"):
        assert record[key] == straight[key], key
    losses = [point["loss"] for point in record["eval_points"]]
    assert losses == [point["loss"] for point in straight["eval_points"]]
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").open()]
    assert steps == list(range(1, N_STEPS + 1))
    assert not list(folder.glob("state/*/checkpoints/.*"))


def chosen(points: dict[str, int], seed: int) -> list[tuple[str, int]]:
    generator = random.Random(seed)
    return [(point, generator.randint(1, most)) for point, most in points.items()]


POINTS = chosen(dict.fromkeys(STEP_POINTS, 2) | CHECKPOINT_POINTS, seed=1) + [
    (point, 1) for point in END_POINTS
]


@pytest.mark.parametrize(("point", "n"), POINTS)
def test_killed_at_any_point(
    trainers: Trainers, runs: dict[str, Any], tmp_path: Path, point: str, n: int
) -> None:
    killed_and_resumed(trainers, runs, tmp_path, "lora", (point, n, KILL))


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize(
    ("point", "n"),
    [
        *chosen(dict.fromkeys(("enter:data_wait", "exit:forward", "enter:optimizer"), 15), seed=2),
        *chosen(dict.fromkeys(("enter:take", "exit:save_file", "enter:prune"), 3), seed=3),
        ("enter:eval", 2),
    ],
)
def test_told_to_stop_at_any_point(
    trainers: Trainers, runs: dict[str, Any], tmp_path: Path, point: str, n: int, number: int
) -> None:
    killed_and_resumed(trainers, runs, tmp_path, "lora", (point, n, number))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "lora"])
@pytest.mark.parametrize(
    ("point", "n", "number"),
    [("exit:backward", 12, KILL), ("exit:sync", 2, KILL), ("enter:optimizer", 7, TERM)],
)
def test_every_method(
    trainers: Trainers,
    runs: dict[str, Any],
    tmp_path: Path,
    method: str,
    point: str,
    n: int,
    number: int,
) -> None:
    killed_and_resumed(trainers, runs, tmp_path, method, (point, n, number))
