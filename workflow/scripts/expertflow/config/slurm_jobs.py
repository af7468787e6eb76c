"""Jobs that a killed Snakemake left to Slurm, which starts and ends them without it."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from expertflow.config.guard import note

POLL_S, TOLD_EVERY_S = 10.0, 60.0
ANSWER_S = 60


def run_name(workflow: Any) -> str | None:
    """Give the name that the Slurm plugin gives all jobs of this run; null with another engine."""
    if workflow.executor_plugin.name != "slurm":
        return None
    # The plugin tells its name nowhere else before it submits.
    name: str = workflow.scheduler._executor.run_uuid
    return name


def wait_for_jobs(names: Sequence[str]) -> None:
    """Wait until Slurm has no job of these runs: they write what this run would write."""
    if not names:
        return
    if shutil.which("squeue") is None:
        note(
            "the run before this one was killed, or is at work, on Slurm, and there is no squeue"
            " here to ask; see that none of its jobs is left"
        )
        return
    told_s = None
    while told := _still_there(names):
        if told_s is None or time.monotonic() - told_s >= TOLD_EVERY_S:
            note(told)
            told_s = time.monotonic()
        time.sleep(POLL_S)


def _still_there(names: Sequence[str]) -> str:
    """Say what is waited for; nothing once all jobs have ended."""
    command = ["squeue", "--noheader", "--format=%A", f"--name={','.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"squeue did not answer in {ANSWER_S} s; it is asked for jobs of a killed run again"
    if done.returncode:
        return f"squeue failed ({done.stderr.strip()}); it is asked for jobs of a killed run again"
    ids = " ".join(sorted(set(done.stdout.split()), key=int))
    if not ids:
        return ""
    return (
        f"jobs of a run that was killed are still with Slurm: waiting for {ids}; to end them"
        f" sooner: scancel {ids}"
    )
