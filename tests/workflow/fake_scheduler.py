"""A batch scheduler in one file, for tests: every job starts at once, in a group of its own.

fake_scheduler.py submit FOLDER SCRIPT    prints the job's number
fake_scheduler.py status FOLDER JOB       prints running, success or failed
fake_scheduler.py cancel FOLDER JOB…      SIGTERM, and after a grace of 20 seconds SIGKILL
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 20


def submit(folder: Path, script: str) -> None:
    number = 1 + len(list(folder.glob("*.job")))
    job = folder / f"{number}.job"
    job.write_text(Path(script).read_text())
    runner = [sys.executable, __file__, "run", str(folder), str(number)]
    log = (folder / f"{number}.log").open("w")
    subprocess.Popen(runner, stdout=log, stderr=log, start_new_session=True)
    print(number)


def run(folder: Path, number: str) -> None:
    """Run a job and write down how it ended; stays outside of the job's process group."""
    process = subprocess.Popen(["sh", str(folder / f"{number}.job")], start_new_session=True)
    write(folder / f"{number}.pid", str(process.pid))
    write(folder / f"{number}.code", str(process.wait()))


def write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def status(folder: Path, number: str) -> None:
    code = folder / f"{number}.code"
    print("running" if not code.exists() else "success" if code.read_text() == "0" else "failed")


def cancel(folder: Path, *numbers: str) -> None:
    # The shell that starts this has noted it and sent SIGTERM.
    groups = [int((folder / f"{number}.pid").read_text()) for number in numbers]
    later = [sys.executable, __file__, "kill", str(folder), *map(str, groups)]
    null = subprocess.DEVNULL  # the command answers at once, as Snakemake demands
    subprocess.Popen(later, stdin=null, stdout=null, stderr=null, start_new_session=True)


def kill(_: Path, *groups: str) -> None:
    alive, end = [int(group) for group in groups], time.monotonic() + GRACE_S
    while alive and time.monotonic() < end:
        time.sleep(0.1)
        alive = signal_groups(alive, 0)
    signal_groups(alive, signal.SIGKILL)


def signal_groups(groups: list[int], number: int) -> list[int]:
    there = []
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            continue
        there.append(group)
    return there


VERBS = {"submit": submit, "run": run, "status": status, "cancel": cancel, "kill": kill}

if __name__ == "__main__":
    VERBS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
