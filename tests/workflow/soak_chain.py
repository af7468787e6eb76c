"""Kill complete runs at random moments for a given time; no partial file may count as made.

    make soak-chain MINUTES=60
    PYTHONPATH=tests:tests/workflow:workflow/scripts python tests/workflow/soak_chain.py --seed 7

Each round starts with raw data only. A signal is sent to the process group during training, and
then, while the same command is repeated, to the group or to Snakemake alone at random
moments, until the report exists. It must mention the resumed training, every record must match
its sidecar, and the rules' outputs must equal, byte for byte, those of an uninterrupted run.
Stops at the first difference and keeps its folder. The last line is JSON.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interrupted import Run, assert_tidy
from support import PATIENCE_S
from workflow_space import Workspace, let_trainings_rest, make_workspace, manifest

from expertflow.core.files import sha256_file

TARGET = "results/tiny/report.json"
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEFT_ALONE_FRACTION = 0.05
# Files without times of day or durations.
FILES = (
    "datasets.json", "keep.arrow", "model.json", "packing.json", "plan.json",
    "merged/model.safetensors", "merged/config.json", "merged/tokenizer.json",
)  # fmt: skip
FOLDERS = ("packed", "base_model", "documents", "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    generator = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-chain-"))
    print(f"seed {args.seed}, in {folder}", flush=True)
    end_s = time.monotonic() + 60 * args.minutes
    raw = make_workspace(folder / "raw")
    let_trainings_rest(raw)
    raw.write_manifest("tiny", manifest(max_steps=40, save_steps=5))
    expected, longest_s = straight(raw, folder / "round")
    counts = {"rounds": 0, "stopped": 0, "resumed": 0}
    while not counts["rounds"] or time.monotonic() < end_s:
        shutil.rmtree(folder / "round")
        space = raw.copy(folder / "round")
        counts["stopped"] += until_done(space, generator, longest_s)
        counts["resumed"] += check(space, expected)
        counts["rounds"] += 1
        print(f"equal after {counts['stopped']} stops in {counts['rounds']} rounds", flush=True)
    shutil.rmtree(folder)
    print(json.dumps({"seed": args.seed, **counts, "different": 0}))


def straight(raw: Workspace, root: Path) -> tuple[dict[str, str], float]:
    space, start = raw.copy(root), time.monotonic()
    run = Run(space, TARGET, rest_from=None)
    assert run.end() == 0, run.told()
    return made(space), time.monotonic() - start


def until_done(space: Workspace, generator: random.Random, longest_s: float) -> int:
    amid = Run(space, TARGET)
    amid.wait_for_training()
    amid.send("group", generator.choice(SIGNALS))
    amid.end()
    stops = 1
    while True:
        run = Run(space, TARGET, rest_from=None)
        try:
            # Some are left alone longer than they need, so that a round ends.
            alone = generator.random() < LEFT_ALONE_FRACTION
            run.process.wait(PATIENCE_S if alone else generator.uniform(0.5, longest_s / 8))
        except subprocess.TimeoutExpired:
            run.send(generator.choice(["group", "group", "snakemake"]), generator.choice(SIGNALS))
            stops += 1
            run.end()
            continue
        if run.process.returncode == 0:
            return stops
        sys.exit(f"{space.root}: the command failed on its own: {run.told()}")


def check(space: Workspace, expected: dict[str, str]) -> int:
    """Return how often the training was resumed, according to its report."""
    assert_tidy(space)
    done = space.script("verify_results")
    if done.returncode:
        sys.exit(f"{space.root}: {done.stdout}")
    found = made(space)
    if different := [name for name in expected | found if found.get(name) != expected.get(name)]:
        sys.exit(f"{space.root}: other {', '.join(different)} than in an uninterrupted run")
    told = space.record("report.json")["training_report"]["training"]
    training = space.record("training.json")
    for here, there in (("sessions", "n_sessions"), ("resumed_at_steps", "resumed_at_steps")):
        if told[here] != training[there]:
            sys.exit(f"{space.root}: the report lists {here} {told[here]}, not {training[there]}")
    if not told["resumed_at_steps"]:
        sys.exit(f"{space.root}: the training was not resumed")
    return len(told["resumed_at_steps"])


def made(space: Workspace) -> dict[str, str]:
    results = space.root / "results" / "tiny"
    hashes = {name: sha256_file(results / name) for name in FILES}
    # Sidecars contain the time they were written.
    inside = (path for name in FOLDERS for path in (results / name).rglob("[!.]*"))
    files = {path.relative_to(results).as_posix(): path for path in inside if path.is_file()}
    return hashes | {name: sha256_file(path) for name, path in files.items()}


if __name__ == "__main__":
    main()
