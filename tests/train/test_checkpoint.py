import logging
import math
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_net import content, snapshot, steps, tiny_net, train_plan, trained

from expertflow.core import files
from expertflow.core.errors import HardwareError, TrainingError
from expertflow.train.model.weights import weights_sha256
from expertflow.train.optimizers import make_optimizer
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver, Snapshot

PLAN = train_plan()
EIGHT_BIT = pytest.mark.extra("bitsandbytes")
RUNS = [
    ("full", "adamw_torch_fused", torch.float32),
    ("full", "adamw_torch", torch.bfloat16),
    pytest.param("full", "adamw_8bit", torch.float32, marks=EIGHT_BIT),
    ("lora", "adamw_torch_fused", torch.bfloat16),
    pytest.param("lora", "adamw_8bit", torch.bfloat16, marks=EIGHT_BIT),
    ("dora", "adamw_torch_fused", torch.float32),
]


def restored(directory: Path, net: Any, optimizer: Any, **how: Any) -> dict[str, Any]:
    how = {"rank": 0, "world_size": 1, "scaler": None, **how}
    return checkpoint.restore_checkpoint(directory, model=net, optimizer=optimizer, **how)


def saved(state: Path, *, step: int, loss: float | None = None, keep: int = 9) -> Path:
    net, optimizer = trained(PLAN)
    return checkpoint.write_checkpoint(
        state, snapshot(net, optimizer, step=step, loss=loss), keep=keep
    )


def names(state: Path) -> list[int]:
    return [
        int(path.name.removeprefix("step-"))
        for path in checkpoint_files.complete_checkpoints(state)
    ]


@pytest.mark.parametrize(("method", "optim", "dtype"), RUNS)
def test_a_resumed_run_goes_on_bit_by_bit(
    tmp_path: Path, method: str, optim: str, dtype: torch.dtype
) -> None:
    plan = train_plan(optim=optim)
    net, optimizer = trained(plan, method, dtype=dtype)
    random.gauss(0, 1)  # leaves a second number behind
    path = checkpoint.write_checkpoint(tmp_path, snapshot(net, optimizer, step=3), keep=1)
    expected_random = random.gauss(0, 1)
    steps(net, optimizer, plan, of=range(3, 8))

    other = tiny_net(method, dtype=dtype, seed=1)
    new = make_optimizer(other, plan)
    assert restored(path, other, new)["step"] == 3
    assert random.gauss(0, 1) == expected_random
    steps(other, new, plan, of=range(3, 8))
    assert weights_sha256(other) == weights_sha256(net)


def test_a_snapshot_does_not_change_while_training_goes_on(tmp_path: Path) -> None:
    net, optimizer = trained(PLAN)
    points = [1.0]
    progress = {"step": 3, "seed": 1, "points": points}
    taken: Any = checkpoint.take_snapshot(
        model=net, optimizer=optimizer, scaler=None, progress=progress
    )
    first = checkpoint.write_checkpoint(tmp_path / "a", taken, keep=1)
    steps(net, optimizer, PLAN, of=range(3, 6))
    points.append(2.0)
    second = checkpoint.write_checkpoint(tmp_path / "b", taken, keep=1)
    assert content(second) == content(first)
    assert checkpoint_files.read_progress(second)["points"] == [1.0]


def test_there_is_nothing_in_a_checkpoint_that_could_run(tmp_path: Path) -> None:
    files = {path.name for path in saved(tmp_path, step=1).iterdir()}
    assert files == {"weights.safetensors", "optimizer.safetensors", "progress.json"}


def test_files_and_directories_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the log of steps, which could not be written again."""
    (tmp_path / "steps.jsonl").write_text("{}\n")
    flushed: list[tuple[str, bool]] = []
    target = tmp_path / "checkpoints" / "step-00000001"

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append((path.name.split(".")[-1], target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    saved(tmp_path, step=1)
    assert set(flushed) == {
        ("jsonl", False), (tmp_path.name, False), ("safetensors", False), ("json", False),
        ("partial", False), ("checkpoints", True),
    }  # fmt: skip


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    saved(tmp_path / "other", step=1)
    assert checkpoint_files.best_checkpoint(tmp_path / "other") is None
    assert checkpoint_files.newest_checkpoint(tmp_path / "elsewhere") is None
    for step, loss in [(1, 3.0), (2, 1.0), (3, None), (4, math.nan), (5, 1.0), (6, 2.0)]:
        saved(tmp_path, step=step, loss=loss, keep=2)
    assert names(tmp_path) == [2, 5, 6]
    assert checkpoint_files.best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    "name", [checkpoint_files.WEIGHTS, checkpoint_files.OPTIMIZER, checkpoint_files.PROGRESS]
)
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, change: str
) -> None:
    good, bad = saved(tmp_path, step=1), saved(tmp_path, step=2)
    if change == "cut":
        (bad / name).write_bytes((bad / name).read_bytes()[:-1])
    else:
        (bad / name).unlink()
    net, optimizer = trained(PLAN)
    with pytest.raises(TrainingError, match=name) as caught:
        restored(bad, net, optimizer)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_files.newest_checkpoint(tmp_path) == good
    assert name in caplog.text and str(bad) in caplog.text
    saved(tmp_path, step=3, keep=2)
    assert names(tmp_path) == [1, 3] and not bad.exists()


@pytest.mark.parametrize("name", [checkpoint_files.WEIGHTS, checkpoint_files.OPTIMIZER])
@pytest.mark.parametrize("loss", [None, 1.0])
def test_what_a_power_cut_left_full_of_zeros_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, loss: float | None
) -> None:
    """Sizes are right, so only the content tells: of the newest, and of the best."""
    spoilt = saved(tmp_path, step=1, loss=0.5) if loss else saved(tmp_path, step=3)
    good = saved(tmp_path, step=2, loss=loss)
    (spoilt / name).write_bytes(bytes((spoilt / name).stat().st_size))
    assert spoilt in checkpoint_files.complete_checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        checkpoint_files.remove_partials(tmp_path)
    assert f"{spoilt} is removed: {name} does not hold what was written" in caplog.text
    assert list((tmp_path / "checkpoints").iterdir()) == [good]


def test_the_state_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, step=1)
    lora = tiny_net("lora")
    with pytest.raises(TrainingError, match="remove the state"):
        restored(path, lora, make_optimizer(lora, PLAN))
    half = tiny_net(dtype=torch.bfloat16)
    with pytest.raises(TrainingError, match=r"is float32 .* in the saved state and bfloat16"):
        restored(path, half, make_optimizer(half, PLAN))


@EIGHT_BIT
def test_the_state_of_8_bit_adamw_is_no_other_one_s(tmp_path: Path) -> None:
    path = saved(tmp_path, step=1)
    net = tiny_net()
    with pytest.raises(TrainingError, match="AdamW8bit"):
        restored(path, net, make_optimizer(net, train_plan(optim="adamw_8bit")))


def test_another_number_of_processes_starts_random_numbers_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, step=1)
    draws = []
    for rank in (0, 1, 0):
        net, optimizer = trained(PLAN)
        with caplog.at_level(logging.WARNING):
            restored(path, net, optimizer, rank=rank, world_size=2)
        draws.append((torch.rand(4).tolist(), random.random()))
    assert draws[0] == draws[2] != draws[1]
    assert "saved by 1 processes on cpu and resumed by 2 on cpu" in caplog.text


def test_the_scaler_comes_back(tmp_path: Path) -> None:
    net, optimizer = trained(PLAN)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    progress = {"step": 1, "seed": 1}
    taken: Any = checkpoint.take_snapshot(
        model=net, optimizer=optimizer, scaler=scaler, progress=progress
    )
    path = checkpoint.write_checkpoint(tmp_path, taken, keep=1)
    other = torch.amp.GradScaler("cpu")
    assert restored(path, net, optimizer, scaler=other) == progress
    assert other.state_dict() == scaler.state_dict()


def taken(step: int) -> Snapshot:
    net, optimizer = trained(train_plan(), n_steps=1)
    return snapshot(net, optimizer, step=step)


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to one page, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def folders(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "checkpoints").iterdir())


def test_a_full_disk_stops_the_trainer_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    writer = Saver(tmp_path, keep=1)
    writer.submit(taken(1))
    writer.wait()
    with full_disk():
        writer.submit(taken(2))
        with pytest.raises(
            HardwareError, match=r"step-00000002: .* could not be written"
        ) as caught:
            writer.submit(taken(3))
    assert "\n" not in str(caught.value)
    assert folders(tmp_path) == ["step-00000001"]
    writer.wait()


def test_the_error_of_the_training_is_the_one_to_see(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), full_disk(), Saver(tmp_path, keep=1) as writer:
        writer.submit(taken(1))
        raise ZeroDivisionError
    assert "the last checkpoint was not written" in caplog.text


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_while_an_old_one_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    checkpoint.write_checkpoint(tmp_path, taken(1), keep=1)

    def killed(path: Path) -> None:
        min(path.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write_checkpoint(tmp_path, taken(step), keep=1)
    assert checkpoint_files.complete_checkpoints(tmp_path) == [
        tmp_path / "checkpoints" / f"step-{step:08d}"
    ]
    assert checkpoint_files.complete_checkpoints(tmp_path) == sorted(
        tmp_path.glob("checkpoints/step-*")
    )
    checkpoint_files.remove_partials(tmp_path)
    assert folders(tmp_path) == [f"step-{step:08d}"]
