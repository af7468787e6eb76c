"""The trainer, but it pauses after every save until it is asked to stop.

Its steps take milliseconds: without a pause, it may finish before a test on a busy machine sees its
first checkpoint and stops it. A script with the arguments of train_expert.py.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

import train_expert
from expertflow.core import cli
from expertflow.train import step_hooks

# Its parent may have ended.
LONGEST_S = 600
save = step_hooks.save_checkpoint


def save_and_rest(run: Any) -> None:
    save(run)
    # The others wait for the first one in their next step.
    if run.processes.is_first:
        run.saver.wait()
        end = time.monotonic() + LONGEST_S
        while not run.stop() and time.monotonic() < end:
            time.sleep(0.01)


step_hooks.save_checkpoint = save_and_rest
cli.run(train_expert.main)
