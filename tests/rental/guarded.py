"""A guarded command in a folder of its own, and a stand-in for a trainer."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import SCRIPTS

PATIENCE_S = 600.0
# Counts steps; told to stop, it finishes its step, saves, and ends as ours do. A file "hold" keeps
# it saving.
TRAINER = """
import signal, sys, time
from pathlib import Path

came = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda received, _: came.append(received))
with open("starts.txt", "a") as stream:
    stream.write("started\\n")
save_s, n_steps = float(sys.argv[1]), int(sys.argv[2])
for step in range(n_steps):
    time.sleep(0.02)
    if came:
        # Fails where the pipe of the log has ended.
        print("saving", file=sys.stderr, flush=True)
        time.sleep(save_s)
        while Path("hold").exists():
            time.sleep(0.02)
        Path("saved.txt").write_text(str(step))
        sys.exit(143)
"""


def write_trainer(folder: Path) -> Path:
    path = folder / "trainer.py"
    path.write_text(TRAINER)
    return path


def trainer(folder: Path, *, save_s: float = 0.0, n_steps: int = 100_000) -> list[str]:
    """Give a command that runs a stand-in for a trainer."""
    return [sys.executable, str(write_trainer(folder)), str(save_s), str(n_steps)]


def start(
    folder: Path,
    *options: str,
    command: list[str],
    env: dict[str, str] | None = None,
    program: Path = SCRIPTS / "guard_run.py",
) -> "subprocess.Popen[str]":
    """Start a guard in a folder."""
    return subprocess.Popen(
        [sys.executable, str(program), *options, "--", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )


def end(guard: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for a guard; give its exit code and what it said."""
    try:
        out, _ = guard.communicate(timeout=PATIENCE_S)
    finally:
        guard.kill()
    return guard.returncode, out


def run(folder: Path, *options: str, command: list[str], **env: str) -> tuple[int, str]:
    return end(start(folder, *options, command=command, env=env))


def record(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "results" / "guard.json").read_text())
    return value


def wait_for(what: Callable[[], bool], *, said: str) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, said
        time.sleep(0.02)


def start_trainer(folder: Path, *options: str, **settings: Any) -> "subprocess.Popen[str]":
    """Start a guard, and wait until its trainer is at work."""
    guard = start(folder, *options, **{"command": trainer(folder), **settings})
    wait_for((folder / "starts.txt").is_file, said="the trainer did not start")
    return guard


def n_starts(folder: Path) -> int:
    return len((folder / "starts.txt").read_text().splitlines())
