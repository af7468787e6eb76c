"""Kill trainers at random moments for as long as wished; their weights must not notice.

    make soak MINUTES=60
    PYTHONPATH=tests:workflow/scripts python tests/train/soak.py --minutes 60 --seed 7

Each round takes a kind of run, kills it again and again at random moments by random signals until
it comes to its end, and compares the weights with those of the run that was never stopped. Stops
at the first difference and keeps its folder. The last line is JSON.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import write_tiny_run
from test_fault_points import METHODS, N_STEPS
from trainers import Trainers

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# About what the longest of the runs takes when it is left alone; some are killed as they start.
LONGEST_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    generator = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {args.seed}, in {folder}")
    trainers, end_s = Trainers(), time.monotonic() + 60 * args.minutes
    expected = {method: straight(trainers, folder / method) for method in METHODS}
    counts = {"rounds": 0, "killed": 0, "resumed": 0}
    while time.monotonic() < end_s:
        method = generator.choice(sorted(METHODS))
        run = folder / "round"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / method / "inputs", run)
        while not (run / "training.json").exists():
            after_s, number = generator.uniform(0, LONGEST_S), generator.choice(SIGNALS)
            counts["killed"] += trainers.train(run, after_s=after_s, number=number)["code"] != 0
        record = json.loads((run / "training.json").read_text())
        if record["weights_sha256"] != expected[method]:
            sys.exit(f"{method}: other weights than those of a straight run; see {run}")
        counts["rounds"] += 1
        counts["resumed"] += len(record["resumed_at_steps"])
        print(f"{method}: equal after {record['n_sessions']} sessions", flush=True)
    trainers.close()
    shutil.rmtree(folder)
    print(json.dumps({"seed": args.seed, **counts, "different": 0}))


def straight(trainers: Trainers, folder: Path) -> Any:
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    write_tiny_run(inputs, n_steps=N_STEPS, **METHODS[folder.name])
    shutil.copytree(inputs, folder / "straight")
    return trainers.finish(folder / "straight")["weights_sha256"]


if __name__ == "__main__":
    main()
