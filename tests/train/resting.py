"""The trainer, but it rests whenever it has saved, until it is told to stop.

Its steps take milliseconds: one that does not rest may be at its end before a busy machine has let
a test see its first checkpoint and stop it. A script with the arguments of train_expert.py.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
# Whoever started it may be gone.
LONGEST_S = 600


def start_resting(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--code", "c", "--results", str(folder)]
    command += ["--output", str(folder / "training.json")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_checkpoints(folder: Path, process: subprocess.Popen[str], n: int = 1) -> None:
    deadline = time.monotonic() + 300
    while len(list(folder.glob("state/*/checkpoints/step-*"))) < n:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.005)


def main() -> None:
    sys.path.insert(0, str(SCRIPTS))
    import train_expert
    from expertflow.core import cli
    from expertflow.train import step_hooks

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


if __name__ == "__main__":
    main()
