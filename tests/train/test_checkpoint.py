"""Checkpoints: identical bits, complete or absent, agreed on, written in the background."""

import hashlib
import logging
import math
import os
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_net import content, restored, snapshot, steps, tiny_net, train_plan, trained

from expertflow.core import files
from expertflow.core.errors import HardwareError, TrainingError
from expertflow.train.model.weights import weights_sha256
from expertflow.train.optimizers import make_optimizer
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver, Snapshot
from expertflow.train.saved.checkpoint_files import OPTIMIZER, PROGRESS, WEIGHTS

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


def taken(step: int, **progress: Any) -> Snapshot:
    made: Snapshot = snapshot(*trained(PLAN), step=step, **progress)
    return made


def saved(state: Path, step: int = 1, *, keep: int = 9, **progress: Any) -> Path:
    return checkpoint.write_checkpoint(state, taken(step, **progress), keep=keep)


def folders(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "checkpoints").iterdir())


@pytest.mark.parametrize(("method", "optim", "dtype"), RUNS)
def test_resumed_bit_by_bit(tmp_path: Path, method: str, optim: str, dtype: torch.dtype) -> None:
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


def test_a_snapshot_does_not_change_while_training_continues(tmp_path: Path) -> None:
    net, optimizer = trained(PLAN)
    points = [1.0]
    taken = snapshot(net, optimizer, step=3, points=points)
    first = checkpoint.write_checkpoint(tmp_path / "a", taken, keep=1)
    steps(net, optimizer, PLAN, of=range(3, 6))
    points.append(2.0)
    second = checkpoint.write_checkpoint(tmp_path / "b", taken, keep=1)
    assert content(second) == content(first)
    assert checkpoint_files.read_progress(second)["points"] == [1.0]
    with torch.no_grad():
        net.up.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"up\.weight is not finite after step 7"):
        snapshot(net, optimizer, step=7)


def test_everything_is_flushed_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the log of steps, which could not be rewritten."""
    (tmp_path / "steps.jsonl").write_text("{}\n")
    flushed: list[tuple[str, bool]] = []
    target = tmp_path / "checkpoints" / "step-00000001"

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append((path.name.split(".")[-1], target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    files = {path.name for path in saved(tmp_path).iterdir()}
    assert files == {"weights.safetensors", "optimizer.safetensors", "progress.json"}, "no code"
    assert set(flushed) == {
        ("jsonl", False), (tmp_path.name, False), ("safetensors", False), ("json", False),
        ("step-00000001", False), ("checkpoints", True),
    }  # fmt: skip


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saved(tmp_path / "other")
    assert checkpoint_files.best_checkpoint(tmp_path / "other") is None
    assert checkpoint_files.newest_checkpoint(tmp_path / "elsewhere") is None
    for step, loss in [(1, 3.0), (2, 1.0), (3, None), (4, math.nan), (5, 1.0), (6, 2.0)]:
        saved(tmp_path, step, held_out_loss=loss, keep=2)
    assert folders(tmp_path) == [f"step-{step:08d}" for step in (2, 5, 6)]
    assert checkpoint_files.best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


def test_the_newest_checkpoint_of_an_unfinished_training_is_found(tmp_path: Path) -> None:
    assert checkpoint_files.newest_unfinished(tmp_path) is None
    for name, at_s in (("older", 10), ("newer", 20), ("finished", 30), ("z", None), (".t", 40)):
        (tmp_path / name).mkdir()
        if at_s is not None:
            os.utime(saved(tmp_path / name), (at_s, at_s))
    (tmp_path / "finished" / checkpoint_files.OUTCOME).write_text("{}")
    found = checkpoint_files.newest_unfinished(tmp_path)
    assert found == tmp_path / "newer" / "checkpoints" / "step-00000001"


def test_the_clock_continues_from_where_it_was_last_seen(tmp_path: Path) -> None:
    assert checkpoint_files.last_seen_s(tmp_path) == 0.0
    for step, wall_s in ((1, 7.5), (2, 8.5), (3, 3.5)):
        saved(tmp_path, step, clock={"wall": wall_s})
    assert checkpoint_files.last_seen_s(tmp_path) == 3.5
    (tmp_path / "gpu.jsonl").write_text('{"elapsed_s": 9.5}\n{"elapsed_s": 4.5}\n')
    assert checkpoint_files.last_seen_s(tmp_path) == 9.5


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, PROGRESS])
@pytest.mark.parametrize("n_bytes", [-1, None])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, n_bytes: int | None
) -> None:
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    content = (bad / name).read_bytes()
    (bad / name).unlink()
    if n_bytes is not None:
        (bad / name).write_bytes(content[:n_bytes])
    with pytest.raises(TrainingError, match=name):
        restored(bad, *trained(PLAN))
    with caplog.at_level(logging.WARNING):
        assert checkpoint_files.newest_checkpoint(tmp_path) == good
    assert name in caplog.text and str(bad) in caplog.text
    saved(tmp_path, 3, keep=2)
    assert folders(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("loss", [None, 1.0])
def test_leftovers_of_a_power_failure_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str,
    loss: float | None,
) -> None:  # fmt: skip
    """Zeros of the right size, detectable only by content: in the newest, and in the best."""
    spoilt = saved(tmp_path, 1, held_out_loss=0.5) if loss else saved(tmp_path, 3)
    good = saved(tmp_path, 2, held_out_loss=loss)
    (spoilt / name).write_bytes(bytes((spoilt / name).stat().st_size))
    assert spoilt in checkpoint_files.complete_checkpoints(tmp_path)
    for folder in ("profile", "checkpoints", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / ".half.partial").touch()
    read, hash_files = [], checkpoint_files.hash_files

    def hashed(folder: Path, names: list[str]) -> dict[str, str]:
        read.extend([folder] if names else [])
        return hash_files(folder, names)

    monkeypatch.setattr(checkpoint_files, "hash_files", hashed)
    with caplog.at_level(logging.WARNING):
        checkpoint_files.remove_partials(tmp_path)
    assert sorted(read) == sorted([good, spoilt]), "what is the newest and the best is read once"
    assert f"removing {spoilt}: {name} does not match what was written" in caplog.text
    left = {path for path in tmp_path.rglob("*") if path.parent != good}
    assert left == {tmp_path / "profile", tmp_path / "checkpoints", good}


def test_the_state_of_one_optimizer_is_not_anothers(tmp_path: Path) -> None:
    path, net = saved(tmp_path), tiny_net()
    with pytest.raises(TrainingError, match="the optimizer was AdamW and is SGD in this run"):
        restored(path, net, torch.optim.SGD(net.parameters()))


def test_more_processes_draw_new_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    draws = []
    for rank in (0, 1, 0):
        with caplog.at_level(logging.WARNING):
            assert restored(path, *trained(PLAN), rank=rank, world_size=2)["step"] == 1
        draws.append((torch.rand(4).tolist(), random.random()))
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(*draws[:2], strict=True))
    # Seed, step and rank alone decide.
    number = int(hashlib.sha256(b"1 1 1").hexdigest()[:15], 16)
    assert draws[1][1] == random.Random(number).random()
    assert "saved by 1 processes on cpu and resumed by 2 on cpu" in caplog.text


def test_a_group_of_one_saves_like_a_single_process(tmp_path: Path) -> None:
    # Without a second number of a pair left behind, unlike above.
    random.seed(1)
    alone, drawn = saved(tmp_path / "alone"), (torch.rand(4).tolist(), random.gauss(0, 1))
    random.seed(1)
    place = f"file://{tmp_path}/group"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        grouped = saved(tmp_path / "grouped")
    finally:
        dist.destroy_process_group()
    assert content(grouped) == content(alone)
    restored(grouped, *trained(PLAN))
    assert (torch.rand(4).tolist(), random.gauss(0, 1)) == drawn


def test_small_copies_from_a_card_are_pinned_and_its_random_state_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uses mocks, as there is no card here."""
    cuda, asked, given = torch.device("cuda"), list[bool](), list[Any]()

    def empty(_: Any, *, dtype: Any, pin_memory: bool) -> Any:
        asked.append(pin_memory)
        return SimpleNamespace(copy_=lambda _, *, non_blocking: asked.append(non_blocking))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        for n_bytes in (1, 16 << 20, (16 << 20) + 1):
            whole: Any = SimpleNamespace(device=cuda, nbytes=n_bytes, shape=(), dtype=None)
            checkpoint._host_copy(whole)
    assert asked == [True] * 4 + [False] * 2
    state = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *told: given.append(told))
    checkpoint._set_random_states(checkpoint.random_states(cuda), rank=0, device=cuda)
    assert given == [(state, cuda)]


def test_the_scaler_is_restored(tmp_path: Path) -> None:
    net, optimizer = trained(PLAN)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    made = snapshot(net, optimizer, step=1, scaler=scaler)
    path = checkpoint.write_checkpoint(tmp_path, made, keep=1)
    other = torch.amp.GradScaler("cpu")
    assert restored(path, net, optimizer, scaler=other) == checkpoint_files.read_progress(path)
    assert other.state_dict() == scaler.state_dict()
    # A scaler is not required, and a run without one does not change it.
    restored(path, net, optimizer)
    restored(saved(tmp_path), net, optimizer, scaler=other)
    assert other.state_dict() == scaler.state_dict()


def second_of_two(step: int, own: int) -> Any:
    """Return the second process of two; the first one has a checkpoint of a step."""

    def of_all(number: int) -> list[list[int]]:
        assert number == own
        return [[step], [number]]

    return SimpleNamespace(world_size=2, rank=1, of_all=of_all)


def test_all_resume_from_the_first_processs_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, alone = saved(tmp_path, 3), SimpleNamespace(world_size=1)
    for own in (path, None):
        assert checkpoint.agree_on(own, tmp_path, alone) == own  # type: ignore[arg-type]
    assert checkpoint.agree_on(path, tmp_path, second_of_two(-1, own=3)) is None
    assert checkpoint.agree_on(None, tmp_path, second_of_two(3, own=-1)) == path
    with pytest.raises(
        TrainingError, match="process 1 cannot resume from it as the first one does"
    ):
        checkpoint.agree_on(path, tmp_path, second_of_two(4, own=3), within_s=0.0)
    # On a slow file system it becomes visible later.
    monkeypatch.setattr(checkpoint.time, "sleep", lambda _: saved(tmp_path, 4))
    found = checkpoint.agree_on(path, tmp_path, second_of_two(4, own=3))
    assert found == checkpoint_files.newest_checkpoint(tmp_path) != path


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to one page, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_trainer_and_keeps_the_previous_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path, keep=1)
    saver.submit(taken(1))
    saver.wait()
    with full_disk():
        saver.submit(taken(2))
        with pytest.raises(HardwareError, match=r"step-00000002: .* not be written"):
            saver.submit(taken(3))
    assert folders(tmp_path) == ["step-00000001"]
    saver.wait()
    # Training ends when its last checkpoint is written, or with its own error.
    with pytest.raises(HardwareError, match="not be written"), full_disk():
        with Saver(tmp_path, keep=1) as saver:
            saver.submit(taken(2))
    with pytest.raises(ZeroDivisionError), full_disk(), Saver(tmp_path, keep=1) as saver:
        saver.submit(taken(2))
        raise ZeroDivisionError
    assert "the last checkpoint was not written" in caplog.text


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_while_an_old_one_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    saved(tmp_path, 1)

    remove = shutil.rmtree

    def killed(path: Path, **settings: Any) -> None:
        if not (old := sorted(path.rglob("*.safetensors"))):
            return remove(path, **settings)
        old[0].unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, step, keep=1)
    whole = [tmp_path / "checkpoints" / f"step-{step:08d}"]
    assert checkpoint_files.complete_checkpoints(tmp_path) == whole
    assert list(tmp_path.glob("checkpoints/step-*")) == whole
    checkpoint_files.remove_partials(tmp_path)
    assert folders(tmp_path) == [f"step-{step:08d}"]
