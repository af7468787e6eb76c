"""Kill trainers at random moments for a given time; their weights must not change.

    make soak MINUTES=60
    PYTHONPATH=tests:workflow/scripts python tests/train/soak.py --minutes 60 --seed 7

Each round takes a kind of run, kills it repeatedly at random moments with random signals until
it finishes, and compares it with an uninterrupted run. Stops at the first
difference and keeps its folder. The last line is JSON. ``test_resume.py`` runs some rounds.
"""

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support import LORA, write_tiny_run
from trainers import Trainers

N_STEPS = 20
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "dora": {"lora": replace(LORA, use_dora=True)},
    "accumulation": {"lora": LORA, "batch_size": 2, "gradient_accumulation_steps": 3},
    "checkpointing": {"lora": LORA, "gradient_checkpointing": True},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "pure_bf16": {"pure_bf16": True},
    "qlora": {"lora": LORA, "method": "qlora"},
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
Record = dict[str, Any]


class Straight:
    """Initial files of a method's runs, and the record and seconds of an uninterrupted one."""

    def __init__(self, trainers: Trainers, folder: Path, method: str) -> None:
        self.inputs = folder / method
        self.inputs.mkdir(parents=True)
        write_tiny_run(self.inputs, n_steps=N_STEPS, **METHODS[method])
        run, start_s = folder / f"{method}-straight", time.monotonic()
        shutil.copytree(self.inputs, run)
        self.record: Record = trainers.finish(run)
        self.took_s = time.monotonic() - start_s


def assert_same(folder: Path, record: Record, expected: Record) -> None:
    for key in (
        "weights_sha256", "n_tokens", "n_target_tokens", "n_padding_tokens", "loss_first",
        "loss_last",
    ):  # fmt: skip
        assert record[key] == expected[key], f"{folder}: {key}"
    losses, wanted = ([p["loss"] for p in r["eval_points"]] for r in (record, expected))
    assert losses == wanted, folder
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").open()]
    assert steps == list(range(1, N_STEPS + 1)), folder
    assert not list(folder.glob("state/**/.*")), f"{folder}: a partial file is left"


def kill_until_done(
    trainers: Trainers, straight: Straight, folder: Path, generator: random.Random
) -> int:
    """Kill a run at random moments until it finishes; return the number of kills."""
    shutil.copytree(straight.inputs, folder, dirs_exist_ok=True)
    n_killed = 0
    while not (folder / "training.json").exists():
        # Some are killed as they start, and some finish.
        after_s, number = generator.uniform(0, 1.2 * straight.took_s), generator.choice(SIGNALS)
        code = trainers.train(folder, after_s=after_s, number=number)["code"]
        assert not 0 < code < 128, f"{folder}: it failed on its own, see its log"
        n_killed += code != 0
    assert_same(folder, json.loads((folder / "training.json").read_text()), straight.record)
    return n_killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    generator = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {args.seed}, in {folder}")
    trainers, end_s = Trainers(), time.monotonic() + 60 * args.minutes
    straight: dict[str, Straight] = {}
    counts = {"rounds": 0, "killed": 0, "resumed": 0}
    run = folder / "round"
    while not counts["rounds"] or time.monotonic() < end_s:
        method = generator.choice(sorted(METHODS))
        if method not in straight:
            straight[method] = Straight(trainers, folder, method)
        shutil.rmtree(run, ignore_errors=True)
        counts["killed"] += kill_until_done(trainers, straight[method], run, generator)
        record = json.loads((run / "training.json").read_text())
        counts["rounds"] += 1
        counts["resumed"] += len(record["resumed_at_steps"])
        print(f"{method}: equal after {record['n_sessions']} sessions", flush=True)
    trainers.close()
    shutil.rmtree(folder)
    print(json.dumps({"seed": args.seed, **counts, "different": 0}))


if __name__ == "__main__":
    main()
