"""Complete runs in one process: divergence, patience, clock, monitor, and published files."""

import contextlib
import json
import logging
import math
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import accelerate.tracking
import psutil
import pytest
import tiny_run
import torch
from accelerate.utils import LoggerType
from safetensors.torch import load_file
from support import LORA, wait_for
from tiny_run import assembled, made, train

from expertflow.core.attempts import process_age_s
from expertflow.core.errors import TrainingError
from expertflow.core.progress import break_silence
from expertflow.core.records import read_record
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.train import job, loop, publish
from expertflow.train.job import run_monitor
from expertflow.train.model.load import load_for_export
from expertflow.train.model.packed import PackedLoss
from expertflow.train.model.weights import Diverged, list_trained_parameters
from expertflow.train.processes import start_processes
from expertflow.train.publish import LOGS, read_outcome, write_outcome
from expertflow.train.records import EvalPoint
from expertflow.train.run import PendingStep, TrainInputs
from expertflow.train.saved import checkpoint_files
from expertflow.train.step_hooks import flush_steps, out_of_patience


def steps(inputs: TrainInputs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (inputs.state / "steps.jsonl").open()]


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (math.nan, "its loss is nan"),
        (50.0, r"its loss is 50 nats per token, above max_loss 9\.1"),
        (5.0, "its loss is 5 and its gradient norm is 0"),
    ],
)
def test_a_run_that_diverges_stops_and_keeps_its_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, problem: str
) -> None:
    inputs = made(tmp_path, n_steps=20)
    forward, calls = PackedLoss.forward, {"n": 0}

    def break_at_8(self: PackedLoss, batch: Any) -> torch.Tensor:
        value = forward(self, batch)
        calls["n"] += self.training
        worse = self.training and calls["n"] >= 8
        return value * 0 + loss * batch.n_target_tokens if worse else value

    monkeypatch.setattr(PackedLoss, "forward", break_at_8)
    with pytest.raises(Diverged, match=rf"step 8 diverged: {problem}") as caught:
        train(inputs)
    good = inputs.state / "checkpoints" / "step-00000005"
    assert f"the last good state is {good}" in str(caught.value)
    assert checkpoint_files.complete_checkpoints(inputs.state) == [good]
    assert [step["step"] for step in steps(inputs)] == [1, 2, 3, 4, 5]


def test_a_model_that_fails_untrained_is_not_blamed_on_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = made(tmp_path, n_steps=4)
    monkeypatch.setattr(PackedLoss, "forward", lambda *_: torch.tensor(math.nan))
    with pytest.raises(Diverged, match="after step 0 is nan; the model itself fails in fp32"):
        train(inputs)


def test_timed_steps_show_where_their_time_went(tmp_path: Path) -> None:
    inputs = made(tmp_path, n_steps=40)
    outcome = train(inputs)
    timed = [step for step in steps(inputs) if step["forward_s"] is not None]
    assert [step["step"] for step in timed] == [11, 31]
    for step in timed:
        parts = sum(step[f"{part}_s"] for part in ("h2d", "forward", "backward", "optimizer"))
        assert 0 < parts + step["data_wait_s"] <= step["step_s"]
    assert outcome.sampled_steps is not None and outcome.sampled_steps.n_steps == 2
    mean = sum(step["forward_s"] for step in timed) / 2
    assert outcome.sampled_steps.forward_s == pytest.approx(mean)


@pytest.mark.parametrize(("scale", "diverged"), [(0.5, True), (1024.0, False)])
def test_endlessly_skipped_steps_end_the_run(tmp_path: Path, scale: float, diverged: bool) -> None:
    line = dict.fromkeys(
        ("epoch", "learning_rate", "n_tokens", "n_target_tokens", "step_s", "data_wait_s",
         "elapsed_s"), 1,
    )  # fmt: skip
    skipped = PendingStep(
        line={"step": 1, **line}, loss=torch.tensor(4.0), grad_norm=torch.tensor(math.nan),
        n_padding=0, parts=None,
    )  # fmt: skip
    with assembled(made(tmp_path, n_steps=4)) as run:
        run.processes.accelerator.scaler = SimpleNamespace(get_scale=lambda: scale)
        run.pending.append(skipped)
        with pytest.raises(Diverged) if diverged else contextlib.nullcontext():
            flush_steps(run)


def test_patience() -> None:
    for losses, patience, min_delta, over in (
        ((3.0, 2.0, 2.1, 2.0), 2, 0.0, True),
        ((3.0, 2.0, 2.1, 1.9, 1.95), 2, 0.0, False),
        ((3.0, 2.95, 2.91), 2, 0.1, True),  # slower than min_delta
        ((3.0, 2.95, 2.85), 2, 0.1, False),  # slow, but enough together
        ((3.0, 3.0, 3.0), None, 0.0, False),
    ):
        points = [EvalPoint(step=0, loss=loss, n_target_tokens=1, eval_s=0.0) for loss in losses]
        assert out_of_patience(points, patience, min_delta) is over


def _time_and_age() -> tuple[float, float]:
    return time.monotonic(), process_age_s()


def test_the_age_of_a_process_is_accurate_to_a_hundredth() -> None:
    earliest, tick_s = time.monotonic(), 0.011
    with multiprocessing.get_context("fork").Pool(1) as pool:
        latest = time.monotonic()
        now, age_s = pool.apply(_time_and_age)
    assert earliest - tick_s < now - age_s < latest + tick_s


def test_a_monitor_that_dies_leaves_nulls_with_the_reason(plan: TrainPlan, tmp_path: Path) -> None:
    (tmp_path / "monitor.json").write_text("of an earlier session")
    before = psutil.Process().children()
    with run_monitor(tmp_path, plan, seen_s=0.0):
        samples = tmp_path / "gpu.jsonl"
        wait_for(lambda: samples.is_file() and b"\n" in samples.read_bytes())
        (monitor,) = set(psutil.Process().children()) - set(before)
        monitor.kill()
    record = read_record(MonitorRecord, tmp_path / "monitor.json")
    assert record.gpu_name is None and record.monitor_cpu_fraction is None
    assert record.unavailable["gpu_name"] == "the monitor exited without a summary"
    assert record.n_samples >= 1 and record.ram_used_bytes is not None


def saved(state: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_files.directory_of(state, step) / checkpoint_files.WEIGHTS)


def held(folder: Path, state: Path) -> dict[str, torch.Tensor]:
    base = str(state.parent / "base_model")
    net = load_for_export(folder, base=base, method="", precision="fp32", attention_name="sdpa")
    if hasattr(net, "peft_config"):
        return {n: p.detach() for n, p in net.named_parameters() if "lora_" in n}
    return {name: p.detach() for name, p in list_trained_parameters(net).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_each_kept_checkpoint_is_a_separate_model(tmp_path: Path, lora: Any) -> None:
    inputs = made(tmp_path, lora=lora, n_steps=16, eval_steps=5)
    outcome = train(inputs)
    state = inputs.state
    kept = [checkpoint_files.step_of(path) for path in checkpoint_files.complete_checkpoints(state)]
    found = outcome.candidates
    assert [c.step for c in found] == kept and len(kept) >= 2
    assert [c.path for c in found] == [f"steps/step-{s:08d}" for s in kept[:-1]] + ["."]
    for candidate in found:
        folder = state / "final" / candidate.path
        assert_equal(held(folder, state), saved(state, candidate.step))
        top = {path.name for path in (state / "final").iterdir()} - {"steps"}
        assert {path.name for path in folder.iterdir()} - {"steps"} == top
    assert len({c.weights_sha256 for c in found}) == len(found)
    assert outcome.weights_sha256 == found[-1].weights_sha256
    losses = {point.step: point.loss for point in outcome.eval_points}
    assert [c.held_out_loss for c in found] == [losses.get(step) for step in kept]


# Random documents are memorized, so the held-out loss soon rises.
BY_HEART: dict[str, Any] = {
    "learning_rate": 3e-2, "eval_steps": 2, "n_steps": 60, "patience": 3,
    "load_best_model_at_end": True,
}  # fmt: skip


def test_a_run_stops_early_and_publishes_its_best_weights_whatever_it_keeps(tmp_path: Path) -> None:
    few, many = (made(tmp_path / str(n), save_total_limit=n, **BY_HEART) for n in (1, 9))
    outcome, other = train(few), train(many)
    losses = {point.step: point.loss for point in outcome.eval_points}
    lowest = min(losses, key=losses.__getitem__)
    assert outcome.stopped_early_at_step == outcome.n_steps == lowest + 6 < 60
    # The untrained model cannot be published, however good it is.
    best = min(set(losses) - {0}, key=losses.__getitem__)
    assert outcome.published_step == other.published_step == best < outcome.n_steps
    assert_published(few.state, best)
    assert outcome.weights_sha256 == other.weights_sha256
    assert 2 <= len(outcome.candidates) < len(other.candidates)


def assert_published(state: Path, step: int) -> None:
    assert checkpoint_files.best_checkpoint(state) == checkpoint_files.directory_of(state, step)
    assert_equal(held(state / "final", state), saved(state, step))


def test_a_damaged_best_checkpoint_is_not_reported_as_published(tmp_path: Path) -> None:
    inputs = made(tmp_path, **BY_HEART)
    with assembled(inputs, keep=60) as run:
        loop.train(run)
        run.saver.wait()
        best = run.progress.best
        assert best is not None and best.step < run.progress.step
        directory = checkpoint_files.directory_of(inputs.state, best.step)
        (directory / checkpoint_files.OPTIMIZER).write_bytes(b"cut")
        outcome = publish.finish_run(run)
    assert outcome.published_step != best.step
    assert_published(inputs.state, outcome.published_step)


def test_a_damaged_checkpoint_is_not_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A power failure in an earlier session leaves files of the right size, full of zeros."""
    others = publish._others

    def spoil(run: Any, published: int) -> list[Path]:
        path = checkpoint_files.directory_of(run.state, 5) / checkpoint_files.WEIGHTS
        path.write_bytes(bytes(path.stat().st_size))
        return others(run, published)

    monkeypatch.setattr(publish, "_others", spoil)
    inputs = made(tmp_path, n_steps=15, save_total_limit=9)
    caplog.set_level(logging.INFO)
    with break_silence(every_s=0.01):
        outcome = train(inputs)
    assert [c.step for c in outcome.candidates] == [10, 15]
    assert "step-00000005 is not a candidate: weights.safetensors does not match" in caplog.text
    assert {"loading tiny", "loading tiny, 0 s after the start"} <= {*caplog.messages}


def test_a_damaged_outcome_has_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = made(tmp_path, n_steps=2)
    summary, state = train(inputs), inputs.state
    for name in LOGS:
        (state / name).touch()
    write_outcome(state, summary)
    assert read_outcome(state) == summary
    for name, content, why in (
        ("outcome.json", b'{"n_steps": ', "outcome.json cannot be read"),
        ("final/model.safetensors", b"zeros", "model.safetensors has 5 bytes"),
        ("final/config.json", None, "final/config.json is missing"),
        ("steps.jsonl", b"wh", "steps.jsonl has 2 bytes"),
    ):
        whole = (state / name).read_bytes()
        (state / name).unlink()
        if content is not None:
            (state / name).write_bytes(content)
        assert read_outcome(state) is None
        assert f"{why}" in caplog.text.splitlines()[-1]
        (state / name).write_bytes(whole)
    (state / "steps.jsonl").write_bytes(whole[:-1] + b"?")
    assert read_outcome(state) is None
    assert "steps.jsonl does not match what was written; finishing the run again" in caplog.text
    write_outcome(state, summary := train(inputs))
    assert "steps.jsonl: 2 steps are missing; the weights are not affected" in caplog.text
    assert read_outcome(state) == summary


def train_with(folder: Path, wandb: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with a mock of wandb, which is not a dependency of the project."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    inputs = tiny_run.made(folder, lora=LORA, n_steps=20, report_to="wandb", logging_steps=5)
    job.train_expert(inputs, start_processes(inputs.plan, tracker_directory=str(inputs.state)))


def test_wandb_gets_the_settings_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = MagicMock()
    train_with(tmp_path, wandb, monkeypatch)
    wandb.init.assert_called_once_with(project="expertflow-tiny")
    run = wandb.init.return_value
    run.finish.assert_called_once_with()
    [settings] = [call.args[0] for call in wandb.config.update.call_args_list]
    assert (settings["n_steps"], settings["method"]) == (20, "lora")
    (steps,) = tmp_path.glob("state/steps.jsonl")
    losses = {line["step"]: line["loss"] for line in map(json.loads, steps.open())}
    start, *lines, end = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    assert [step for step, _ in lines] == [5, 10, 15, 20]
    assert all(values["loss"] == losses[step] for step, values in lines)
    assert lines[0][1].keys() == {"loss", "learning_rate", "tokens_per_s", "remaining_s"}
    # An evaluation's own line, of steps that never decrease, as wandb requires.
    assert (start[0], end[0]) == (0, 20) and start[1]["held_out_loss"] > end[1]["held_out_loss"]


def test_without_a_login_a_run_ends_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("No API key configured.\nUse `wandb login` to log in.")
    wandb = MagicMock(**{"init.side_effect": error})
    with pytest.raises(TrainingError, match=r"report_to wandb: No API key .* WANDB_MODE=offline"):
        train_with(tmp_path, wandb, monkeypatch)
