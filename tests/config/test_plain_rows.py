"""A command that is stopped with whoever asked for it, and what it rejected."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S, SCRIPTS, is_running, wait_for

from expertflow.config.plain_rows import keep_rejected

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
