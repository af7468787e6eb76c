"""A command that is stopped with whoever asked for it, and folders that killed runs left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S, SCRIPTS, is_running, wait_for

from expertflow.config.plain_rows import LOCK, keep_rejected, open_workplace

# Runs a shell with a child of its own; both note who they are.
RUN = """
import sys
from expertflow.core.process import run_stoppable
run_stoppable(["bash", "-c", sys.argv[1]], patience_s=0.5)
"""
DEAF = "trap '' INT TERM; "
SHELL = "sleep 600 & echo $! > child; echo $$ > leader.new; mv leader.new leader; wait; sleep 600"


@pytest.mark.parametrize(
    ("number", "shell"),
    [(signal.SIGTERM, DEAF + SHELL), (signal.SIGINT, SHELL), (signal.SIGHUP, SHELL)],
)
def test_a_stop_leaves_no_process(tmp_path: Path, number: signal.Signals, shell: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    process = subprocess.Popen([sys.executable, "-c", RUN, shell], cwd=tmp_path, env=environment)
    wait_for((tmp_path / "leader").exists)
    pids = [int((tmp_path / name).read_text()) for name in ("leader", "child")]
    assert all(map(is_running, pids))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    wait_for(lambda: not any(map(is_running, pids)))


def left_behind(folder: Path, signed: str = '{"host": "h", "pid": 1}\n') -> Path:
    folder.mkdir()
    (folder / LOCK).write_text(signed)
    return folder


def test_folders_of_dead_runs_go_and_others_stay(tmp_path: Path) -> None:
    dead = left_behind(tmp_path / ".rows.abc123_x")
    begun = left_behind(tmp_path / ".rows.abc123_y", "")
    another = left_behind(tmp_path / ".rows2.abc123_")
    (strange := tmp_path / ".rows.abc123_z").mkdir()
    with open_workplace(tmp_path / "rows") as first:
        assert not dead.exists()
        with open_workplace(tmp_path / "rows") as second:
            assert first.path.is_dir() and second.path.is_dir()
        assert first.path.is_dir() and not second.path.exists()
    assert sorted(tmp_path.iterdir()) == sorted([begun, another, strange])


def test_a_folder_stays_as_long_as_a_child_of_its_run_lives(tmp_path: Path) -> None:
    dead = left_behind(tmp_path / ".rows.abc123_x")
    with (dead / LOCK).open("a+") as lock:
        number, pipe = lock.fileno(), subprocess.PIPE
        hold = ["bash", "-c", f"flock {number}; echo; read"]
        child = subprocess.Popen(hold, pass_fds=[number], stdin=pipe, stdout=pipe)
        assert child.stdout is not None
        child.stdout.readline()
    with open_workplace(tmp_path / "rows"):
        assert dead.is_dir()
    child.communicate()
    with open_workplace(tmp_path / "rows"):
        assert not dead.exists()


def test_rejected_records_are_kept_beside_the_output(tmp_path: Path) -> None:
    folder, output, kept = (tmp_path / name for name in ("work", "rows", "rows.rejected"))
    for place in (folder / "a", kept):
        place.mkdir(parents=True)
    (folder / "a" / "001.rejected.jsonl").write_text("")
    assert keep_rejected(folder, output) is None
    (folder / "a" / "000.rejected.jsonl").write_text("{}\n")
    (kept / "007.rejected.jsonl").write_text("of an earlier run")
    (kept / "mine.txt").write_text("of the user")
    assert keep_rejected(folder, output) == kept
    assert sorted(path.name for path in kept.iterdir()) == ["000.rejected.jsonl", "mine.txt"]
