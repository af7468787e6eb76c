"""The trainer, but it rests whenever it has saved, until it is told to stop.

Its steps take milliseconds: one that does not rest may be at its end before a busy machine has let
a test see its first checkpoint and stop it. A script with the arguments of train_expert.py.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

import train_expert
from expertflow.core import cli
from expertflow.train import step_hooks

# Whoever started it may be gone.
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
