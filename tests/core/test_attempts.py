"""When a job ran: until its exit code, or until it was last seen alive."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import SCRIPTS, wait_for

from expertflow.core.attempts import CARDS, LOG, Attempt, attempts_path, read_attempts

JOB = """
import os, sys, time
from expertflow.core import attempts, cli
from expertflow.core.errors import ConfigError
attempts.TOUCH_EVERY_S = 0.01
def main():
    assert attempts.LOG not in os.environ, "processes of a job are no jobs"
    print("here", flush=True)
    action = sys.stdin.readline().strip()
    if action == "fail":
        raise ConfigError("no")
cli.run(main)
"""


def start_job(path: Path, *, n_cards: int = 0) -> subprocess.Popen[str]:
    environment = os.environ | {LOG: str(path), CARDS: str(n_cards), "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", JOB]
    pipe = subprocess.PIPE
    job = subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "here\n"
    return job


def attempts_after(path: Path, *actions: str) -> list[Attempt]:
    for action in actions:
        start_job(path).communicate(f"{action}\n")
    return list(read_attempts(attempts_path(path)))


def test_attempts_count_since_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    assert [a.code for a in attempts_after(path, "fail", "fail", "end")] == [1, 1, 0]
    (last,) = attempts_after(path, "end")
    assert last.code == 0 and last.start_s < last.end_s <= time.time()


def test_a_killed_one_ends_where_it_was_last_seen(tmp_path: Path) -> None:
    path = tmp_path / "evaluate_expert.log"
    job = start_job(path, n_cards=2)
    (running,) = read_attempts(attempts_path(path))
    alive_s = running.end_s + 0.1
    wait_for(lambda: read_attempts(attempts_path(path))[0].end_s > alive_s)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    (killed,) = read_attempts(attempts_path(path))
    assert killed.code is None and alive_s < killed.end_s <= time.time() and killed.n_cards == 2
    assert attempts_after(path, "end")[0] == killed, "the next one does not make it longer"


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    attempts_path(path).write_text("{")
    assert [a.code for a in attempts_after(path, "end")] == [0]


@pytest.mark.parametrize("variables", [{}, {LOG: "{}", "SLURM_PROCID": "1"}])
def test_other_tasks_record_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    place = {name: value.format(tmp_path / "job.log") for name, value in variables.items()}
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)} | place
    subprocess.run(
        [sys.executable, "-c", JOB], env=environment, input="end\n", text=True, check=True
    )
    assert not list(tmp_path.iterdir())
