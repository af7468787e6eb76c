"""Whole runs in one process: early stopping, the best weights, explosions, clock and monitor."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from support import wait_for
from tiny_run import assembled, made, train

from expertflow.core.records import read_record
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.train import loop, publish
from expertflow.train.job import run_monitor
from expertflow.train.model.packed import PackedLoss
from expertflow.train.records import EvalPoint
from expertflow.train.run import Diverged, PendingStep, TrainInputs
from expertflow.train.saved import checkpoint_files
from expertflow.train.step_hooks import flush_steps, out_of_patience
from expertflow.train.timing import process_age_s


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


TICK_S = 0.011


def points(*losses: float) -> list[EvalPoint]:
    return [
        EvalPoint(step=i, loss=loss, n_target_tokens=1, eval_s=0.0) for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "over"),
    [
        ((3.0, 2.0, 2.0), 1, 0.0, True),
        ((3.0, 2.0, 2.1, 2.0), 2, 0.0, True),
        ((3.0, 2.0, 2.1, 1.9, 1.95), 2, 0.0, False),
        ((3.0, 2.95, 2.91), 2, 0.1, True),  # slower than min_delta
        ((3.0, 2.95, 2.85), 2, 0.1, False),  # slow, but together they are enough
        ((3.0, 3.0, 3.0), None, 0.0, False),
    ],
)
def test_patience(
    losses: tuple[float, ...], patience: int | None, min_delta: float, over: bool
) -> None:
    assert out_of_patience(points(*losses), patience, min_delta) is over


def _time_and_age() -> tuple[float, float]:
    return time.monotonic(), process_age_s()


def test_the_age_of_a_process_is_known_to_a_hundredth() -> None:
    earliest = time.monotonic()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        latest = time.monotonic()
        now, age_s = pool.apply(_time_and_age)
    assert earliest - TICK_S < now - age_s < latest + TICK_S


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def n_samples(state: Path) -> int:
    path = state / "gpu.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for_samples(state: Path, n: int) -> None:
    wait_for(lambda: n_samples(state) >= n, said="no samples came")


def record_of(state: Path) -> MonitorRecord:
    return read_record(MonitorRecord, state / "monitor.json")


def test_by_itself_it_follows_the_log_of_steps(plan: TrainPlan, state: Path) -> None:
    lines = [{"step": step, "elapsed_s": 0.05 * step} for step in range(1, 20)]
    automatic = replace(plan, collection_interval_seconds=None, n_steps_per_epoch=20)
    with run_monitor(state, automatic, seen_s=0.0):
        (state / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # Most of these are paced after the log was there.
        wait_for_samples(state, n_samples(state) + 4)
    record = record_of(state)
    assert record.configured_interval_s is None
    assert record.epoch_s == pytest.approx(1.0)
    assert "at most 10 of the 20 samples wanted" in record.remarks[0]


def test_a_monitor_that_dies_leaves_nulls_with_the_reason(plan: TrainPlan, state: Path) -> None:
    (state / "monitor.json").write_text("of an earlier session")
    before = psutil.Process().children()
    with run_monitor(state, plan, seen_s=0.0):
        wait_for_samples(state, 1)
        (monitor,) = set(psutil.Process().children()) - set(before)
        os.kill(monitor.pid, signal.SIGKILL)
    record = record_of(state)
    assert record.gpu_name is None and record.monitor_cpu_fraction is None
    assert record.unavailable["gpu_name"] == "the monitor ended without a summary"
    assert record.n_samples >= 1 and record.ram_used_bytes is not None
