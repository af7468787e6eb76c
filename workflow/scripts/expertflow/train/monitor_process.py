"""Run the monitor as a separate process beside a training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.core.process import stop_group
from expertflow.hardware.monitor import write_missing_record
from expertflow.plan.records import TrainPlan
from expertflow.train.step_hooks import STEPS_FILE
from expertflow.train.timing import process_age_s

MONITOR = Path(__file__).resolve().parents[2] / "monitor_gpu.py"
SAMPLES, RECORD = "gpu.jsonl", "monitor.json"
STOP_S = 60


@contextmanager
def run_monitor(state: Path, plan: TrainPlan, *, seen_s: float) -> Iterator[None]:
    """Monitor the block, as often as the plan says or, by itself, 20 times an epoch.

    A resumed run goes on with its file of samples. Readings are timed by the run's own clock: what
    earlier sessions took (``seen_s``), and then the time since this process started. The monitor is
    a witness: if it fails, the run goes on, and the record says what is missing.
    """
    # What an earlier session left must not pass for this one's.
    (state / RECORD).unlink(missing_ok=True)
    # Its own session: a Ctrl-C meant for the trainer must not end it before the last sample. It
    # ends by itself when the trainer is killed, and keeps none of its pipes open until then.
    monitor = subprocess.Popen(
        _command(state, plan, seen_s),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        stop_group(monitor, patience_s=STOP_S, signals=[signal.SIGTERM])
    (state / SAMPLES).touch()
    if not (state / RECORD).is_file():
        write_missing_record(
            state / RECORD,
            state / SAMPLES,
            configured_s=plan.collection_interval_seconds,
            reason="the monitor ended without a summary",
        )


def _command(state: Path, plan: TrainPlan, seen_s: float) -> list[str]:
    command = [sys.executable, str(MONITOR), "--quiet"]
    command += ["--with-parent", str(os.getpid()), "--n-gpus", str(plan.world_size)]
    command += ["--samples", str(state / SAMPLES), "--output", str(state / RECORD)]
    command += ["--zero", repr(time.time() - process_age_s() - seen_s)]
    command += ["--go-on"] if seen_s > 0 else []
    command += ["--steps", str(state / STEPS_FILE)]
    command += ["--steps-per-epoch", str(plan.n_steps_per_epoch)]
    if plan.collection_interval_seconds is not None:
        command += ["--interval", str(plan.collection_interval_seconds)]
    return command
