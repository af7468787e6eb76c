"""Measure the cost of monitoring: one reading, and training next to the monitor.

    PYTHONPATH=tests:workflow/scripts python bench/monitor_overhead.py

A reading is timed without a card and with one: the machine's own, or else a stub of the driver's
library that is compiled here. The stub answers from a small text file that it rereads for every
query, so its time covers the Python side and those reads, but no calls of a real driver. Training
is a tiny run on the CPU with the monitor next to it, which is paused and resumed in turn (SIGSTOP,
SIGCONT), so that other load on the machine affects both. It reads far more often than usual, so
that its cost stands out from the noise; the cost at one reading per second is that times the
interval.

Prints a table; the last line is JSON. ``step_wall_slowdown`` is how much longer a step takes, the
median of the pairs, with quartiles and the median's standard error: a figure within two of these
is below what the machine can resolve. The share of a core is measured while the monitor runs; a
training on that core cannot lose more than that.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "train"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hardware"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import nvml_stub
import psutil
import torch
from tiny_run import made

from expertflow.hardware.nvml import open_gpus
from expertflow.train import processes
from expertflow.train.feed.loader import load_batches
from expertflow.train.job import run_monitor
from expertflow.train.loop import train_step
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.start import assemble_run

ROOT = Path(__file__).resolve().parents[1]
# Run in a separate process, where the environment selects the library.
READINGS = """
import json, time
from expertflow.hardware.monitor import Sampler
from expertflow.hardware.nvml import open_gpus
with open_gpus() as gpus:
    sampler = Sampler(gpus)
    sampler.read_sample(elapsed_s=0.0)
    wall, cpu, n = time.perf_counter(), time.process_time(), 500
    for i in range(n):
        sampler.read_sample(elapsed_s=float(i))
        if i % 50 == 0:
            # Enough time for the card's counters, which are then read too.
            time.sleep(0.11)
    wall = time.perf_counter() - wall - 0.11 * n / 50
    print(json.dumps([wall / n, (time.process_time() - cpu) / n, bool(gpus.devices)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of training, each time")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between readings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = {**readings(Path(folder)), **compare_training(Path(folder), args)}
    result["interval_s"] = args.interval
    for name in ("step_wall_slowdown", "step_wall_slowdown_error"):
        result[f"{name}_at_1_s"] = result[name] * args.interval
    result["monitor_share_of_a_core_at_1_s"] = result["monitor_share_of_a_core"] * args.interval
    for name, value in result.items():
        print(f"{name:<28}{value if isinstance(value, str) else f'{value:.6g}'}")
    print(json.dumps(result))


def readings(folder: Path) -> dict[str, Any]:
    """Time one reading, with a card and without."""
    with open_gpus() as gpus:
        has_card = bool(gpus.devices)
    none_s = reading_s({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if has_card:
        card_s, of = reading_s(dict(os.environ)), "this machine's card"
    else:
        scenario = nvml_stub.write(folder)
        card_s = reading_s(nvml_stub.environment(nvml_stub.build(folder), scenario))
        of = "a stub of the driver"
    return {
        "reading_without_card_s": none_s[0],
        "reading_with_card_s": card_s[0],
        "reading_with_card_cpu_s": card_s[1],
        "card": of,
    }


def reading_s(environment: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one reading."""
    environment = {**environment, "PYTHONPATH": str(ROOT / "workflow" / "scripts")}
    command = [sys.executable, "-c", READINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall_s, cpu_s, _ = json.loads(done.stdout)
    return wall_s, cpu_s


def compare_training(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare steps per second while the monitor runs and while it is paused, in turn."""
    walls: list[float] = []
    state, taken_s = folder / "watched", 0.0
    state.mkdir()
    with steps(folder) as (plan, do):
        do(args.seconds)
        # This process may have other children.
        before = set(psutil.Process().children())
        with run_monitor(state, plan(args.interval), seen_s=0.0):
            (monitor,) = set(psutil.Process().children()) - before
            wait_until_up(state, monitor)
            for i in range(args.pairs):
                pair = {}
                # The order alternates, so that a drift of the machine affects both.
                for runs in (False, True) if i % 2 else (True, False):
                    monitor.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
                    before_s = sum(monitor.cpu_times()[:2])
                    pair[runs] = do(args.seconds)
                    taken_s += sum(monitor.cpu_times()[:2]) - before_s
                walls.append(pair[True] / pair[False] - 1)
            monitor.send_signal(signal.SIGCONT)
    return {
        **spread("step_wall_slowdown", walls),
        "n_pairs": args.pairs,
        "monitor_share_of_a_core": taken_s / (args.pairs * args.seconds),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return median, quartiles and the median's standard error."""
    low, middle, high = statistics.quantiles(values, n=4)
    error = 1.25 * statistics.stdev(values) / len(values) ** 0.5
    return {name: middle, f"{name}_low": low, f"{name}_high": high, f"{name}_error": error}


@contextmanager
def steps(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield a function that trains for some seconds and returns the seconds per step."""
    inputs = made(folder / "run", n_steps=10**6)
    group = processes.start_processes(inputs.plan)
    with Saver(inputs.state, keep=1) as saver:
        run = assemble_run(inputs, processes=group, saver=saver, stop=lambda: False, directory=None)
        with load_batches(run.feed, 0, plan=run.plan, device=run.device) as batches:

            def do(seconds: float) -> float:
                n, start = 0, time.perf_counter()
                while not n or time.perf_counter() - start < seconds:
                    float(train_step(run, batches).loss)
                    n += 1
                return (time.perf_counter() - start) / n

            yield lambda s: replace(inputs.plan, collection_interval_seconds=s), do


def wait_until_up(state: Path, monitor: psutil.Process) -> None:
    """Wait for the first reading: start-up is measured separately."""
    while not (state / "gpu.jsonl").is_file() or not (state / "gpu.jsonl").stat().st_size:
        if monitor.status() == psutil.STATUS_ZOMBIE:
            sys.exit("the monitor ended before its first reading")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
