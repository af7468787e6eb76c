"""Real runs of the tiny expert that are stopped while they train, and what must hold afterwards."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from support import PATIENCE_S, running_in, wait_for
from workflow_space import SNAKEMAKE, Workspace, let_trainings_rest, make_workspace, manifest

TARGET = "results/tiny/training.json"
N_STEPS = 120


def make_prepared(root: Path) -> Workspace:
    """Make a workspace in which all that comes before training is done."""
    space = make_workspace(root)
    let_trainings_rest(space)
    space.write_manifest("tiny", manifest(max_steps=N_STEPS, save_steps=10, logging_steps=1))
    space.run("results/tiny/staging.json")
    return space


class Run:
    """A Snakemake in a process group of its own, as a terminal would start it.

    Its training rests from the first checkpoint after ``rest_from`` on until it is told to stop, or
    to ``go_on``.
    """

    def __init__(
        self,
        space: Workspace,
        target: str = TARGET,
        *,
        nohup: bool = False,
        rest_from: int | None = 0,
    ) -> None:
        self.space = space
        self.log = space.root / "run.log"
        self.seen = self.trainer()
        self.go_on()
        if rest_from is not None:
            (space.root / f"rest-{rest_from}").touch()
        # Heard although the tests may have been started with nohup.
        hangup = signal.SIG_IGN if nohup else signal.SIG_DFL
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                [str(SNAKEMAKE), "--cores", "2", target],
                cwd=space.root,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
            )

    def wait_for_training(self, n_checkpoints: int = 1) -> None:
        """Wait until a trainer that was not there before has written a checkpoint."""
        self.until(lambda: self.trainer() not in (None, self.seen))
        self.seen = self.trainer()

        def checkpoints() -> list[Path]:
            return sorted(self.space.root.glob("state/tiny/*/checkpoints/step-*"))

        before = checkpoints()[-1:]
        self.until(lambda: len(checkpoints()) >= n_checkpoints and checkpoints()[-1:] != before)

    def until(self, condition: Callable[[], object]) -> None:
        try:
            wait_for(condition, during=self.process)
        except AssertionError:
            raise AssertionError(self.told()) from None

    def go_on(self) -> None:
        for path in self.space.root.glob("rest-*"):
            path.unlink()

    def trainer(self) -> int | None:
        """Return the trainer's process number, by its own signature; null before there is one."""
        for lock in self.space.root.glob("state/tiny/*/lock"):
            with contextlib.suppress(ValueError):  # it is being signed
                pid: int = json.loads(lock.read_text())["pid"]
                return pid
        return None

    def send(self, target: str, number: signal.Signals) -> None:
        if target == "group":
            os.killpg(self.process.pid, number)
        else:
            pid = self.trainer() if target == "trainer" else self.process.pid
            assert pid is not None
            os.kill(pid, number)

    def end(self) -> int:
        """Wait for the end of Snakemake; jobs may be left behind."""
        return self.process.wait(PATIENCE_S)

    def told(self) -> str:
        return self.log.read_text()[-4000:]


def rerun(space: Workspace) -> dict[str, Any]:
    """Run the same command again; it has to finish, and leaves nothing lying about."""
    again = Run(space, rest_from=None)
    assert again.end() == 0, again.told()
    assert_tidy(space)
    record: dict[str, Any] = space.record("training.json")
    return record


def assert_tidy(space: Workspace) -> None:
    until_gone(space)
    for place in ("results", "state"):
        assert not list((space.root / place).rglob("*.partial"))
    assert not list((space.root / ".snakemake" / "incomplete").glob("*"))
    assert not list((space.root / ".snakemake").glob("locks/*"))
    locks = [*space.root.glob(".snakemake/expertflow/*"), *space.root.glob("state/*/*/lock")]
    assert locks
    for path in locks:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def until_gone(space: Workspace) -> None:
    """Wait for the monitor and for what copies a log, which end after the trainer."""
    wait_for(lambda: not running_in(space.root), said="something is still there")


def kill_jobs(space: Workspace) -> None:
    """Kill what a run in this folder started, with what that starts meanwhile."""

    def all_killed() -> bool:
        found = running_in(space.root)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not found

    wait_for(all_killed)


@contextmanager
def never_left(space: Workspace) -> Iterator[None]:
    try:
        yield
    finally:
        kill_jobs(space)
