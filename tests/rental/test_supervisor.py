"""How a guard's supervisor recognizes shells and pipes, and handles processes it cannot kill."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import guarded
import psutil
import pytest
from support import PATIENCE_S, SCRIPTS, running_in

from expertflow.rental.guard import supervisor

SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "busybox")


def test_a_process_that_cannot_be_killed_is_abandoned_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "KILLED_S", 0.2)
    monkeypatch.setattr(supervisor, "MARGIN_S", 0.1)
    process = subprocess.Popen(["sleep", "3600"])
    left = supervisor.Supervisor.__new__(supervisor.Supervisor)
    left.pid, left._code = process.pid, None
    begun_s = time.monotonic()
    assert left.wait() == 137 and time.monotonic() - begun_s > 0.3
    process.terminate()
    assert left.wait() == left.wait() == 143


def test_a_supervisors_snakemake_is_interrupted_once_it_waits_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living = [SimpleNamespace(pid=pid) for pid in (1, 2, 3)]
    who = {1: ("snakemake", True), 2: ("bash", False), 3: ("python", False)}
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(supervisor, "_living", lambda: living)
    monkeypatch.setattr(supervisor, "_identity", lambda process: who[process.pid])
    monkeypatch.setattr(supervisor, "_send", lambda process, n: sent.append((process.pid, n)))
    monkeypatch.setattr(supervisor._Stop, "_terminate", lambda *_, **__: None)
    clock = SimpleNamespace()
    monkeypatch.setattr(supervisor, "time", clock)
    stop = supervisor._Stop(9, grace_s=600.0)

    def go_on_at(now_s: float) -> None:
        clock.monotonic = lambda: now_s
        stop.go_on(kill=False)

    for now_s in (0.0, 20.0, 40.0):
        go_on_at(now_s)
    assert not sent, "a job still saves"
    living.pop()
    told = []
    for now_s in (50.0, 65.0, 66.0, 80.0, 82.0):
        go_on_at(now_s)
        told.append(len(sent))
    assert told == [0, 0, 1, 1, 2] and set(sent) == {(1, signal.SIGINT)}


def test_snakemake_is_recognized_by_its_command() -> None:
    for line, is_scheduler in (
        ("/opt/bin/snakemake all", True),
        ("python /opt/bin/snakemake all", True),
        ("python -u -m snakemake all", True),
        ("python -X dev -W ignore snakemake all", True),
        ("python train.py snakemake", False),
    ):
        process = SimpleNamespace(cmdline=line.split, name=lambda: "python")
        assert supervisor._identity(process) == ("python", is_scheduler), line  # type: ignore[arg-type]
    ended = MagicMock(cmdline=MagicMock(side_effect=psutil.NoSuchProcess(7)))
    assert supervisor._identity(ended) == ("", False)


class Process:
    """A process in a fake tree."""

    def __init__(self, pid: int, name: str, *below: "Process") -> None:
        self.pid, self.name, self.below = pid, name, below

    def children(self, *, recursive: bool = False) -> list["Process"]:
        deeper = [one for child in self.below for one in child.children(recursive=True)]
        return [*self.below, *(deeper if recursive else [])]


def test_snakemake_is_signaled_first_then_jobs_and_all_are_killed_after_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Process(4, "trainer", Process(5, "loader"))
    retrying, log = Process(6, "sh", Process(8, "fetch")), Process(7, "tee")
    bash = Process(3, "bash", trainer, log)
    snakemake = Process(2, "snakemake", bash, retrying, Process(9, "dash"))
    tree = Process(0, "supervisor", Process(1, "launcher", snakemake))
    # Not small: a machine has been up for a while.
    clock, sent = SimpleNamespace(now_s=1000.0), list[tuple[float, str, int]]()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(psutil, "Process", lambda: tree)
    monkeypatch.setattr(supervisor, "_living", lambda: tree.children(recursive=True))
    monkeypatch.setattr(supervisor, "_identity", lambda one: (one.name, one is snakemake))

    def send(process: Process, number: int) -> None:
        sent.append((clock.now_s - 1000, process.name, number))

    monkeypatch.setattr(supervisor, "_send", send)
    # A float that differences of such times equal.
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.25)
    stop = supervisor._Stop(1, grace_s=10.0)
    for after_s in (0.0, 0.25, 0.5, 9.5, 10.0, 10.5):
        clock.now_s = 1000 + after_s
        if after_s == 9.5:
            # The one polls beside its trainer, the other goes on to its next command.
            bash.below += (Process(10, "poll"),)
            retrying.below = (Process(11, "fetch"),)
        stop.go_on(kill=False)
    told = [(0.0, "launcher", signal.SIGTERM), (0.0, "snakemake", signal.SIGTERM)]
    told += [(0.5, name, signal.SIGTERM) for name in ("trainer", "fetch", "dash")]
    told += [(9.5, name, signal.SIGTERM) for name in ("poll", "sh", "fetch")]
    names = ("launcher", "snakemake", "bash", "trainer", "loader", "tee", "poll", "sh", "fetch")
    assert sent[: len(told)] == told
    killed = sorted((10.5, name, signal.SIGKILL) for name in (*names, "dash"))
    assert sorted(sent[len(told) :]) == killed
    clock.now_s += supervisor.KILLED_S
    assert not stop.is_hopeless
    clock.now_s += 1
    assert stop.is_hopeless


def supervise(command: list[str], before: str = "", guard: str = "os.getppid()") -> Any:
    code = (
        f"import os\nfrom expertflow.rental.guard import supervisor\n{before}\n"
        f"supervisor._become_supervisor({command}, guard={guard}, grace_s=1.0)"
    )
    environment = {"PYTHONPATH": str(SCRIPTS)}
    program = [sys.executable, "-c", code]
    return subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_if_the_guard_dies_at_the_fork_nothing_is_started(tmp_path: Path) -> None:
    done = supervise(["touch", str(tmp_path / "started")], guard="0")
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert not (tmp_path / "started").exists()


def test_a_command_gets_ctrl_c_and_a_hangup_which_its_supervisor_ignores() -> None:
    asked = "from signal import *; print(getsignal(SIGINT).__name__, getsignal(SIGHUP).name)"
    done = supervise([sys.executable, "-c", asked])
    assert (done.returncode, done.stdout) == (0, "default_int_handler SIG_DFL\n"), done.stderr


def test_a_supervisor_sleeps_while_its_command_runs(tmp_path: Path) -> None:
    # The command waits for the first nap, and fails without one.
    before = f"supervisor.time.sleep = lambda _: open({str(tmp_path / 'nap')!r}, 'w').close()"
    line = "for i in $(seq 200); do [ -e nap ] && exit 0; sleep 0.05; done; exit 5"
    done = supervise(["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; {line}"], before=before)
    assert done.returncode == 0, done.stderr


def test_a_fault_of_the_supervisor_is_shown_and_starts_no_second_guard() -> None:
    done = supervise(["true"], before="supervisor.adopt_orphans = None")
    assert done.returncode == os.EX_SOFTWARE
    assert "TypeError" in done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("kill -USR1 $PPID; exec sleep 3 > /dev/null 2>&1", 137),
        ("sleep 3 > /dev/null 2>&1 & exit 3", 3),
    ],
)
def test_processes_that_survive_a_kill_are_named_and_left(command: str, code: int) -> None:
    before = "supervisor.KILLED_S = 0.1; supervisor._send = lambda *_: None"
    done = supervise(["sh", "-c", command], before=before)
    assert (done.returncode, done.stdout) == (code, "")
    assert "killed but still running: process " in done.stderr


@pytest.mark.long
def test_shells_and_pipes_around_a_trainer_end_after_it(tmp_path: Path) -> None:
    (tmp_path / "snakemake").write_text(guarded.PATIENT)
    words = shlex.join(guarded.trainer(tmp_path))
    line = f"{words} 2>&1 | tee log.txt | cat >> log_too.txt; echo trainer >> ended"
    for name in SHELLS:
        shutil.copy(shutil.which("bash") or "", tmp_path / name)
        line = f"{shlex.quote(str(tmp_path / name))} -c {shlex.quote(line)}; echo {name} >> ended"
    # Launchers between guard and Snakemake pass nothing on.
    shutil.copy(tmp_path / "snakemake", tmp_path / "launcher")
    words = shlex.join([sys.executable, str(tmp_path / "snakemake"), line])
    command = [sys.executable, str(tmp_path / "launcher"), f"{words}; exit"]
    guard = guarded.start_trainer(tmp_path, command=command)
    guard.terminate()
    guarded.end(guard)
    assert (tmp_path / "ended").read_text().split() == ["trainer", *SHELLS]
    for name in ("log.txt", "log_too.txt"):
        assert (tmp_path / name).read_text() == "saving\n"
    assert running_in(tmp_path) == []


@pytest.mark.long
def test_a_command_that_kills_its_whole_group_leaves_nothing(tmp_path: Path) -> None:
    work = shlex.join(guarded.trainer(tmp_path))
    wait = "while [ ! -e starts.txt ]; do sleep 0.01; done"
    guarded.run(tmp_path, line=f"setsid {work} & {wait}; kill -9 0", code=137)
    assert (tmp_path / "saved.txt").is_file()
    assert running_in(tmp_path) == []
