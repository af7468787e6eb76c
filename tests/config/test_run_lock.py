import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from expertflow.config import run_lock
from expertflow.config.run_lock import hold, orphans

CHILD = """
import subprocess
from expertflow.config.run_lock import sign_jobs
sign_jobs()
job = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(job.pid, flush=True)
job.wait()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(**wildcards: str) -> SimpleNamespace:
    return SimpleNamespace(wildcards_dict=wildcards)


def start() -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a run with one job."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert run.stdout
    return run, psutil.Process(int(run.stdout.readline()))


def held_by_another(expert: str) -> subprocess.Popen[str]:
    code = (
        "import time, types; from expertflow.config.run_lock import hold;"
        f" hold([types.SimpleNamespace(wildcards_dict={{'expert': {expert!r}}})], main=True);"
        " print(flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert run.stdout
    run.stdout.readline()
    return run


def test_a_second_run_is_told_who_makes_the_expert(folder: Path) -> None:
    run = held_by_another("a")
    with pytest.raises(SystemExit) as caught:
        hold([job(expert="a")], main=True)
    line = str(caught.value)
    assert f"a is being made by another run, process {run.pid} on " in line and "\n" not in line
    hold([job(expert="b"), job()], main=True)
    hold([job(expert="a")], main=False)
    run.kill()
    run.communicate()
    hold([job(expert="a")], main=True)


def test_a_job_of_a_living_run_is_no_orphan(folder: Path) -> None:
    run, child = start()
    assert orphans() == {}
    run.kill()
    run.communicate()
    assert orphans() == {child.pid: "sleep 600"}
    child.kill()


def test_a_job_of_another_folder_is_none_of_ours(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, child = start()
    run.kill()
    run.communicate()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert orphans() == {}
    child.kill()


@pytest.mark.parametrize("name", ["_place", "NUMBERING"])
def test_a_job_of_another_machine_or_container_is_none_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, child = start()
    run.kill()
    run.communicate()
    elsewhere = folder / "numbering"
    elsewhere.symlink_to("pid:[1]")
    monkeypatch.setattr(run_lock, name, {"_place": lambda: "n/", "NUMBERING": elsewhere}[name])
    assert orphans() == {}
    child.kill()


def test_a_number_that_was_given_away_again_is_no_run(folder: Path) -> None:
    younger, grandchild = start()
    older = psutil.Process(os.getpid())
    assert not run_lock._is_run_of(younger.pid, older)
    for process in (younger, grandchild):
        process.send_signal(signal.SIGKILL)
    younger.communicate()


def test_orphans_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, child = start()
    run.kill()
    run.communicate()
    wait = time.sleep

    def end_while_waited_for(seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        wait(seconds)

    monkeypatch.setattr(run_lock.time, "sleep", end_while_waited_for)
    hold([], main=True)
    assert orphans() == {}
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"waiting for process {child.pid} (sleep 600)" in told
