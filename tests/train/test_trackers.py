"""What a run reports to wandb, which is no package of the project: a module stands in for it."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.tracking
import pytest
import tiny_run
from accelerate.utils import LoggerType
from support import LORA

from expertflow.core.errors import TrainingError
from expertflow.train import job
from expertflow.train.processes import start_processes


class StandIn(ModuleType):
    """As much of wandb as accelerate calls; ``config`` and the run are the module itself."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.config, self._error = self, error
        self.projects: list[str] = []
        self.settings: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.n_finished = 0

    def init(self, project: str) -> "StandIn":
        if self._error is not None:
            raise self._error
        self.projects.append(project)
        return self

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.n_finished += 1


def train(folder: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    inputs = tiny_run.made(folder, lora=LORA, n_steps=20, report_to="wandb", logging_steps=5)
    job.train_expert(inputs, start_processes(inputs.plan, tracker_directory=str(inputs.state)))


def test_wandb_gets_the_settings_and_what_the_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = StandIn()
    train(tmp_path, wandb, monkeypatch)
    assert (wandb.projects, wandb.n_finished) == (["expertflow-tiny"], 1)
    assert (wandb.settings["n_steps"], wandb.settings["method"]) == (20, "lora")
    (steps,) = tmp_path.glob("state/steps.jsonl")
    losses = {line["step"]: line["loss"] for line in map(json.loads, steps.open())}
    assert [step for step, _ in wandb.lines] == [5, 10, 15, 20]
    assert all(values["loss"] == losses[step] for step, values in wandb.lines)
    assert wandb.lines[0][1].keys() == {"loss", "learning_rate", "tokens_per_s", "remaining_s"}


def test_without_a_login_a_run_ends_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = StandIn(ValueError("No API key configured.\nUse `wandb login` to log in."))
    with pytest.raises(TrainingError, match=r"report_to wandb: No API key .* WANDB_MODE=offline"):
        train(tmp_path, wandb, monkeypatch)
