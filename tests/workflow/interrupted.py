"""Real runs of the tiny expert that are stopped during training, and checks afterwards."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support import PATIENCE_S, running_in, wait_for
from warm_python import warm_jobs
from workflow_space import SNAKEMAKE, Workspace

TARGET = "results/tiny/training.json"


class Run:
    """A Snakemake in its own process group, as started by a terminal.

    Its training pauses from the first checkpoint after ``rest_from`` on until it is stopped, or
    told to ``go_on``. Unless ``warm``, its jobs start like a user's.
    """

    def __init__(
        self,
        space: Workspace,
        *,
        nohup: bool = False,
        rest_from: int = 0,
        warm: bool = True,
    ) -> None:
        self.space = space
        self.log = space.root / "run.log"
        self.seen = self.n_resumed()
        self.go_on()
        (space.root / f"rest-{rest_from}").touch()

        def hear_signals() -> None:
            """The tests may have been started with nohup, or in a shell's background."""
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                [str(SNAKEMAKE), "--cores", "2", TARGET],
                cwd=space.root, stdout=stream, stderr=stream, start_new_session=True,
                preexec_fn=hear_signals, env=os.environ | (warm_jobs() if warm else {}),
            )  # fmt: skip

    def wait_for_training(self, n_checkpoints: int = 1) -> int:
        """Wait until a new trainer has written a checkpoint; return the trainer."""
        self.until(
            lambda: len(self.checkpoints()) >= n_checkpoints and self.n_resumed() > self.seen
        )
        self.seen, trainer = self.n_resumed(), self.trainer()
        assert trainer is not None
        return trainer

    def n_resumed(self) -> int:
        """Return how often the training of the newest checkpoint was resumed; -1 without one."""
        for folder in self.checkpoints()[-1:]:
            return len(json.loads((folder / "progress.json").read_text())["resumed_at_steps"])
        return -1

    def checkpoints(self) -> list[Path]:
        return sorted(self.space.root.glob("state/tiny/*/checkpoints/step-*"))

    def until(self, condition: Callable[[], object]) -> None:
        try:
            wait_for(condition, during=self.process)
        except AssertionError:
            raise AssertionError(self.told()) from None

    def go_on(self) -> None:
        for path in self.space.root.glob("rest-*"):
            path.unlink()

    def trainer(self) -> int | None:
        """Return the trainer's process id, from its own record; null if there is none yet."""
        for lock in self.space.root.glob("state/tiny/*/lock"):
            with contextlib.suppress(ValueError):  # it is being written
                pid: int = json.loads(lock.read_text())["pid"]
                return pid
        return None

    def send(self, target: str, number: signal.Signals) -> None:
        """Send a signal to Snakemake alone, or to its entire ``group``."""
        if target == "group":
            os.killpg(self.process.pid, number)
        else:
            assert target == "snakemake", target
            self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def told(self) -> str:
        return self.log.read_text()[-4000:]


def rerun(space: Workspace) -> dict[str, Any]:
    """Run the same command again; it must finish and leave nothing behind."""
    for path in space.root.glob("rest-*"):
        path.unlink()
    space.run(TARGET)
    return read_tidy(space)


def finish(run: Run) -> dict[str, Any]:
    """Wait for the end of a run, which must leave nothing behind; return what was trained."""
    run.go_on()
    assert run.end() == 0, run.told()
    return read_tidy(run.space)


def read_tidy(space: Workspace) -> dict[str, Any]:
    # The monitor and the copying of a log end after the trainer.
    wait_for(lambda: not running_in(space.root), message="something is still running")
    for place in ("results", "state"):
        assert not list((space.root / place).rglob("*.partial"))
    assert not list((space.root / ".snakemake" / "incomplete").glob("*"))
    assert not list((space.root / ".snakemake").glob("locks/*"))
    locks = [*space.root.glob(".snakemake/expertflow/*"), *space.root.glob("state/*/*/lock")]
    assert locks
    for path in locks:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    record: dict[str, Any] = space.record("training.json")
    return record


def kill_jobs(space: Workspace) -> None:
    """Kill all processes started by a run in this folder, including new ones."""

    def all_killed() -> bool:
        found = running_in(space.root)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not found

    wait_for(all_killed)
