"""Jobs that a killed run left to Slurm are waited for, whoever is killed while waiting."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertflow.config import slurm_jobs
from expertflow.config.run_lock import _held, hold
from expertflow.core.locks import EXPERT_LOCKS

JOBS = [SimpleNamespace(wildcards_dict={"expert": "a"})]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give what lets squeue run a script, which may write into the folder it is called in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.01)

    def write(script: str) -> None:
        program = tmp_path / "squeue"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


def let_go() -> None:
    """End the run, for its locks."""
    while _held:
        _held.pop().close()


def runs_of(expert: str) -> list[str]:
    found: list[str] = json.loads((EXPERT_LOCKS / f"{expert}.lock").read_text())["slurm_runs"]
    return found


def test_the_jobs_of_the_run_before_are_waited_for(
    squeue: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    squeue("exit 1")
    hold(JOBS, main=True, slurm_run="first")
    let_go()
    assert capsys.readouterr().err == "", "there was no run before: nothing is asked"
    squeue('echo "$@" >> asked; [ $(wc -l < asked) = 3 ] || printf "8\\n7\\n"')
    hold(JOBS, main=True, slurm_run="second")
    let_go()
    told = capsys.readouterr().err
    assert "waiting for 7 8; to end them sooner: scancel 7 8" in told and told.count("\n") == 1
    asked = Path("asked").read_text().splitlines()
    assert len(asked) == 3 and all(line.endswith("--name=first") for line in asked)
    assert runs_of("a") == ["second"]


def test_a_squeue_that_fails_says_nothing_about_jobs(
    squeue: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    hold(JOBS, main=True, slurm_run="first")
    let_go()
    squeue("[ -e failed ] || { touch failed; echo no controller >&2; exit 1; }")
    hold(JOBS, main=True)
    let_go()
    assert "squeue failed (no controller)" in capsys.readouterr().err
    assert runs_of("a") == []


def test_a_run_that_is_killed_while_it_waits_hands_the_jobs_on(
    squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(JOBS, main=True, slurm_run="first")
    let_go()
    squeue("echo 7")

    def killed(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slurm_jobs.time, "sleep", killed)
        hold(JOBS, main=True, slurm_run="second")
    let_go()
    assert runs_of("a") == ["first", "second"]


def test_without_squeue_the_user_is_told(
    squeue: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hold(JOBS, main=True, slurm_run="first")
    let_go()
    monkeypatch.setenv("PATH", "/nowhere")
    hold(JOBS, main=True)
    let_go()
    assert "no squeue here to ask" in capsys.readouterr().err
