"""Whole runs in one process: early stopping, the best weights, explosions, and a second look."""

import contextlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import assembled, made, train

from expertflow.train import job, loop, processes, publish
from expertflow.train.model.packed import PackedLoss
from expertflow.train.records import RunSummary
from expertflow.train.run import Diverged, PendingStep, TrainInputs
from expertflow.train.saved import checkpoint_files
from expertflow.train.step_hooks import flush_steps


def steps(inputs: TrainInputs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (inputs.state / "steps.jsonl").open()]


def test_a_run_stops_early_and_publishes_its_best_weights(tmp_path: Path) -> None:
    """Random documents are learned by heart, so the held-out loss rises soon."""
    inputs = made(
        tmp_path, learning_rate=3e-2, eval_steps=2, patience=3, load_best_model_at_end=True,
        n_steps=60, save_steps=1000, save_total_limit=1,
    )  # fmt: skip
    outcome = train(inputs)
    losses = {point.step: point.loss for point in outcome.eval_points}
    lowest = min(losses, key=losses.__getitem__)
    assert outcome.stopped_early_at_step == outcome.n_steps == lowest + 6 < 60
    # The untrained model is not there to be published, however good it is.
    best = min(set(losses) - {0}, key=losses.__getitem__)
    assert best < outcome.n_steps
    assert outcome.published_step == best
    directory = checkpoint_files.best_checkpoint(inputs.state)
    assert directory is not None and directory.name == f"step-{best:08d}"
    kept = load_file(directory / checkpoint_files.WEIGHTS)
    published = load_file(inputs.state / "final" / "model.safetensors")
    assert all(torch.equal(published[name], tensor) for name, tensor in kept.items())


def test_trackers_end_before_the_clock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker may wait for its network at the end, and that is time of the run."""
    done: list[str] = []
    inputs = made(tmp_path, n_steps=2)
    group = processes.start_processes(inputs.plan)
    group.accelerator.trackers = [SimpleNamespace(finish=lambda: done.append("tracker"))]
    summarize = publish.summarize_run

    def told(*arguments: Any, **named: Any) -> RunSummary:
        done.append("clock")
        return summarize(*arguments, **named)

    monkeypatch.setattr(publish, "summarize_run", told)
    job.train_expert(inputs, group)
    assert done == ["tracker", "clock"]


def broken_at(monkeypatch: pytest.MonkeyPatch, *, step: int, loss: float) -> None:
    forward, calls = PackedLoss.forward, {"n": 0}

    def broken(self: PackedLoss, batch: Any) -> torch.Tensor:
        value = forward(self, batch)
        calls["n"] += self.training
        worse = self.training and calls["n"] >= step
        return value * 0 + loss * batch.n_target_tokens if worse else value

    monkeypatch.setattr(PackedLoss, "forward", broken)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (math.nan, "its loss is nan"),
        (math.inf, "its loss is inf"),
        (50.0, r"its loss is 50 nats a token, above max_loss 9\.1"),
    ],
)
def test_a_run_that_diverges_stops_and_keeps_its_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, problem: str
) -> None:
    inputs = made(tmp_path, n_steps=20)
    broken_at(monkeypatch, step=8, loss=loss)
    with pytest.raises(Diverged, match=rf"step 8 diverged: {problem}") as caught:
        train(inputs)
    assert f"the last good state is {inputs.state}/checkpoints/step-00000005" in str(caught.value)
    assert [path.name for path in checkpoint_files.complete_checkpoints(inputs.state)] == [
        "step-00000005"
    ]
    assert [step["step"] for step in steps(inputs)] == [1, 2, 3, 4, 5]


def test_the_bar_for_an_explosion_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = made(tmp_path, n_steps=10, max_loss=100.0)
    broken_at(monkeypatch, step=8, loss=50.0)
    assert train(inputs).loss_last == pytest.approx(50.0, rel=1e-6)


def test_timed_steps_tell_where_their_time_went(tmp_path: Path) -> None:
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


def test_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    """4 x 4 rows equal 16: the loss is divided by the targets of all of them."""
    losses = []
    for name, micro, accumulation in (("whole", 16, 1), ("parts", 4, 4)):
        inputs = made(
            tmp_path / name, batch_size=micro, gradient_accumulation_steps=accumulation, n_steps=8
        )
        train(inputs)
        losses.append([step["loss"] for step in steps(inputs)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_damaged_best_checkpoint_is_not_passed_off_as_published(tmp_path: Path) -> None:
    inputs = made(
        tmp_path, learning_rate=3e-2, eval_steps=2, n_steps=60, load_best_model_at_end=True,
        save_total_limit=60,
    )  # fmt: skip
    with assembled(inputs, keep=60) as run:
        loop.train(run)
        run.saver.wait()
        best = run.progress.best
        assert best is not None and best.step < 60
        damaged = inputs.state / "checkpoints" / f"step-{best.step:08d}"
        (damaged / checkpoint_files.OPTIMIZER).write_bytes(b"cut")
        outcome = publish.finish_run(run)
    assert outcome.published_step != best.step
    kept = checkpoint_files.best_checkpoint(inputs.state)
    assert kept is not None and kept.name == f"step-{outcome.published_step:08d}"
    published = load_file(inputs.state / "final" / "model.safetensors")
    saved = load_file(kept / checkpoint_files.WEIGHTS)
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())


class StuckScaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


@pytest.mark.parametrize(("scale", "diverged"), [(0.5, True), (1024.0, False)])
def test_steps_that_a_scaler_skips_for_ever_end_the_run(
    tmp_path: Path, scale: float, diverged: bool
) -> None:
    inputs = made(tmp_path, n_steps=4)
    with assembled(inputs) as run:
        group = run.processes
        run.processes = SimpleNamespace(  # type: ignore[inputs]
            accelerator=SimpleNamespace(scaler=StuckScaler(scale)), device=group.device,
            add_up=group.add_up, is_first=True,
        )  # fmt: skip
        line = {
            "step": 1, "epoch": 0.1, "learning_rate": 1e-3, "n_tokens": 9, "n_target_tokens": 9,
            "step_s": 0.1, "data_wait_s": 0.0, "elapsed_s": 1.0,
        }  # fmt: skip
        skipped = PendingStep(
            line=line, loss=torch.tensor(4.0), grad_norm=torch.tensor(math.nan), n_padding=0,
            parts=None,
        )  # fmt: skip
        run.pending.append(skipped)
        with pytest.raises(Diverged) if diverged else contextlib.nullcontext():
            flush_steps(run)
