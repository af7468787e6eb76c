import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_net import snapshot, train_plan, trained

from expertflow.core import files
from expertflow.core.errors import HardwareError
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver, Snapshot


def taken(step: int) -> Snapshot:
    net, optimizer = trained(train_plan(), n_steps=1)
    return snapshot(net, optimizer, step=step)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a page, as a disk that is full would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "checkpoints").iterdir())


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, order = threading.Event(), []
    really_write = checkpoint.write

    def write(state: Path, taken: Snapshot, *, keep: int) -> Path:
        assert go_on.wait(120)
        order.append(taken.step)
        return really_write(state, taken, keep=keep)

    monkeypatch.setattr(checkpoint, "write", write)
    with Saver(tmp_path, keep=2) as writer:
        writer.submit(taken(1))
        order.append(0)
        go_on.set()
        writer.submit(taken(2))
        assert order[:2] == [0, 1], "the second begins when the first is written"
    assert order == [0, 1, 2]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert writer.written_s > 0
    assert writer.n_bytes == checkpoint_files.n_bytes(tmp_path / "checkpoints" / "step-00000002")


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
    assert names(tmp_path) == ["step-00000001"]
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
    checkpoint.write(tmp_path, taken(1), keep=1)

    def killed(path: Path) -> None:
        min(path.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write(tmp_path, taken(step), keep=1)
    assert checkpoint_files.complete(tmp_path) == [tmp_path / "checkpoints" / f"step-{step:08d}"]
    assert checkpoint_files.complete(tmp_path) == sorted(tmp_path.glob("checkpoints/step-*"))
    checkpoint_files.remove_partials(tmp_path)
    assert names(tmp_path) == [f"step-{step:08d}"]
