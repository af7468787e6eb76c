"""Real runs of the tiny expert that are stopped while they train, and what must hold afterwards."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from workflow_space import SNAKEMAKE, Workspace, make_workspace, manifest

TARGET = "results/tiny/training.json"
# Long enough to be hit in its middle: a step takes milliseconds.
N_STEPS = 300
PATIENCE_S = 900
RUN = "EXPERTFLOW_RUN"


def make_prepared(root: Path) -> Workspace:
    """Make a workspace in which all that comes before training is done."""
    space = make_workspace(root)
    longer = manifest(max_steps=N_STEPS, save_steps=10, logging_steps=1)
    space.write_manifest("tiny", longer)
    space.run("results/tiny/staging.json")
    return space


class Run:
    """A Snakemake in a process group of its own, as a terminal would start it."""

    def __init__(self, space: Workspace, target: str = TARGET, *, nohup: bool = False) -> None:
        self.space = space
        self.log = space.root / "run.log"
        self.seen = self.trainer()
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                [str(SNAKEMAKE), "--cores", "2", target],
                cwd=space.root,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=_ignore_hangup if nohup else _hear_hangup,
            )

    def wait_for_training(self, n_checkpoints: int = 1) -> None:
        """Wait until a trainer that was not there before has written a checkpoint and goes on."""
        self.until(lambda: self.trainer() not in (None, self.seen))
        self.seen = self.trainer()

        def checkpoints() -> list[Path]:
            return sorted(self.space.root.glob("state/tiny/*/checkpoints/step-*"))

        before = checkpoints()[-1:]
        self.until(lambda: len(checkpoints()) >= n_checkpoints and checkpoints()[-1:] != before)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens while the run goes on."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.told()
            time.sleep(0.005)

    def trainer(self) -> int | None:
        """Give the trainer's process number, by its own signature; null before there is one."""
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


def _ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _hear_hangup() -> None:
    """Hear it although the tests may have been started with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def rerun(space: Workspace) -> dict[str, Any]:
    """Run the same command again; it has to finish, and to leave nothing lying about."""
    again = Run(space)
    assert again.end() == 0, again.told()
    assert_tidy(space)
    record: dict[str, Any] = space.record("training.json")
    return record


def assert_tidy(space: Workspace) -> None:
    """Make sure that no half-written file, no lock and no process is left."""
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
    deadline = time.monotonic() + PATIENCE_S
    while found := jobs(space):
        assert time.monotonic() < deadline, f"still there: {found}"
        time.sleep(0.05)


def jobs(space: Workspace) -> list[psutil.Process]:
    """Find the processes that a run in this folder started."""
    found = []
    for process in psutil.process_iter():
        try:
            signed = process.environ().get(RUN, "")
        except psutil.Error:
            continue
        if signed.split(" ", 2)[2:] == [str(space.root)]:
            found.append(process)
    return found


def kill_jobs(space: Workspace) -> None:
    """Kill the processes that a run in this folder started; some end with those before them."""
    for process in jobs(space):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def never_left(space: Workspace) -> Any:
    """Kill what a failed test would leave running."""
    try:
        yield
    finally:
        kill_jobs(space)
