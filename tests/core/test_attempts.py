"""When a job ran: until its exit code, or until it was last seen alive."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import SCRIPTS, wait_for

from expertflow.core.attempts import ATTEMPT, CARDS, LOG, Attempt, attempts_path, read_attempts

JOB = """
import os, sys, time
from expertflow.core import attempts, cli
from expertflow.core.errors import ConfigError, TransientError
attempts.TOUCH_EVERY_S = 0.01
def main():
    assert attempts.LOG not in os.environ, "processes of a job are no jobs"
    print("here", flush=True)
    # Byte by byte, so that the next line is left to who comes in its place.
    action = b"".join(iter(lambda: os.read(0, 1).strip(), b"")).decode()
    if action == "fail":
        raise ConfigError("no")
    if action == "launch":
        command = [sys.executable, "-c", os.environ["JOB"]]
        os.environ.update(attempts.environment_of_attempt())
        os.execv(sys.executable, command)
    if action == "miss":
        raise TransientError("not yet")
cli.run(main)
"""


def start_job(path: Path, *, n_cards: int = 0, attempt: int = 1) -> subprocess.Popen[str]:
    environment = os.environ | {LOG: str(path), CARDS: str(n_cards), "PYTHONPATH": str(SCRIPTS)}
    environment |= {ATTEMPT: str(attempt), "JOB": JOB}
    command = [sys.executable, "-c", JOB]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def attempts_after(path: Path, *actions: str) -> list[Attempt]:
    for action in actions:
        start_job(path).communicate(f"{action}\n")
    return list(read_attempts(attempts_path(path)))


def test_attempts_count_since_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    assert [a.code for a in attempts_after(path, "fail", "fail", "end")] == [1, 1, 0]
    (last,) = attempts_after(path, "end")
    assert last.code == 0 and last.start_s < last.end_s <= time.time()


def test_a_later_attempt_ends_with_an_error_that_would_come_again(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    attempts_after(path, "miss", "fail")
    assert [a.error for a in read_attempts(attempts_path(path))] == [None, "error: no"]
    before = attempts_path(path).read_bytes()
    again = start_job(path, attempt=2)
    assert again.communicate("end\n") == ("", "error: no\n") and again.returncode == 1
    assert attempts_path(path).read_bytes() == before
    # A run of its own tries it anew, and so does an attempt after an error that may pass.
    attempts_after(path, "miss")
    assert start_job(path, attempt=2).communicate("end\n")[0] == "here\n"
    assert read_attempts(attempts_path(path))[-1].code == 0


def test_processes_of_a_launcher_record_the_same_attempt(tmp_path: Path) -> None:
    path = tmp_path / "train_expert.log"
    job = start_job(path, n_cards=2)
    job.communicate("launch\nfail\n")
    (attempt,) = read_attempts(attempts_path(path))
    assert (attempt.code, attempt.error, attempt.n_cards) == (1, "error: no", 2)


def test_a_killed_one_ends_where_it_was_last_seen(tmp_path: Path) -> None:
    path = tmp_path / "evaluate_expert.log"
    job = start_job(path, n_cards=2)
    assert job.stdout is not None and job.stdout.readline() == "here\n"
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


@pytest.mark.parametrize(
    "variables", [{}, {LOG: "{}", "SLURM_PROCID": "1"}, {LOG: "{}", "RANK": "1"}]
)
def test_other_tasks_record_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    place = {name: value.format(tmp_path / "job.log") for name, value in variables.items()}
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)} | place
    subprocess.run(
        [sys.executable, "-c", JOB], env=environment, input="end\n", text=True, check=True
    )
    assert not list(tmp_path.iterdir())
