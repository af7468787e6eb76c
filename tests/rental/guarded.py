"""A guarded command in a separate folder, and a fake trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import PATIENCE_S, SCRIPTS, patched_script, wait_for

# When stopped, it saves, and exits like ours. A file "hold" keeps it saving.
TRAINER = """
import signal, sys, time
from pathlib import Path

came = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda received, _: came.append(received))
with open("starts.txt", "a") as stream:
    stream.write("started\\n")
while not came:
    time.sleep(0.02)
time.sleep(0.2)
while Path("hold").exists():
    time.sleep(0.02)
# Fails where the pipe of the log has ended.
print("saving", file=sys.stderr, flush=True)
Path("saved.txt").touch()
sys.exit(143)
"""
# A Snakemake that always waits for its job, and passes on no signal.
PATIENT = """#!/usr/bin/env python3
import signal, subprocess, sys

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
sys.exit(subprocess.call(["bash", "-c", sys.argv[1]], preexec_fn=lambda: [
    signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)]))
"""
# A guard's clock that jumps ahead by a thousand seconds as soon as a trainer works, at a dollar
# per second: the budget is spent at once, however long the trainer takes to start.
AHEAD = """
import time
from expertflow.rental.guard.ledger import Meter

ahead = lambda: time.monotonic() + 1000 * Path("starts.txt").is_file()
Meter.__init__.__kwdefaults__["clock"] = ahead
"""
BUDGET = ("--usd-per-hour", "3600", "--max-usd", "500")
# Failed copies are repeated without a wait.
AT_ONCE = """
from expertflow.rental.guard import copies
copies.FIRST_WAIT_S = 0.0
"""
SAID = "$EXPERTFLOW_OUTCOME $EXPERTFLOW_EXIT_CODE $EXPERTFLOW_USD"
HOOK = ("--disk-stays", "--on-finish", f'echo "{SAID}" >> hook')


def trainer(folder: Path) -> list[str]:
    path = folder / "trainer.py"
    path.write_text(TRAINER)
    return [sys.executable, str(path)]


def start(
    folder: Path, *options: str, command: list[str] | None = None, line: str = "", patch: str = "",
    env: dict[str, str] | None = None,
) -> "subprocess.Popen[str]":  # fmt: skip
    """Start a guard of a trainer, a command or a line of Bash; optionally run some code first."""
    program = patched_script(folder, "guard_run", patch) if patch else SCRIPTS / "guard_run.py"
    command = ["bash", "-c", line] if line else command or trainer(folder)
    words = [sys.executable, str(program), *options, "--", *command]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env={**os.environ, **(env or {})}, **pipes)


def end(guard: "subprocess.Popen[str]", *, code: int = 0) -> str:
    """Wait for a guard to end with this exit code; return its output."""
    try:
        out, _ = guard.communicate(timeout=PATIENCE_S)
    finally:
        guard.kill()
    assert guard.returncode == code, out
    return out


def run(folder: Path, *options: str, code: int = 0, **settings: Any) -> str:
    return end(start(folder, *options, **settings), code=code)


def record(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "results" / "guard.json").read_text())
    return value


def start_trainer(folder: Path, *options: str, **settings: Any) -> "subprocess.Popen[str]":
    """Start a guard, and wait until its trainer is running."""
    guard = start(folder, *options, **settings)
    wait_for((folder / "starts.txt").is_file, message="the trainer did not start", during=guard)
    return guard


def wait_for_line(guard: "subprocess.Popen[str]", part: str) -> None:
    assert guard.stdout is not None
    while part not in guard.stdout.readline():
        assert guard.poll() is None
