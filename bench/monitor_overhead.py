"""Measure the cost of monitoring: one reading, and the monitor's share of a core.

    PYTHONPATH=tests:workflow/scripts python bench/monitor_overhead.py

Both are measured without a card and with one: the machine's own, or else a stub of the driver's
library that is compiled here. The stub answers from a small text file that it rereads for every
query, so its time covers the Python side and those reads, but no calls of a real driver. The
monitor is the process that runs next to a training, which cannot lose more than that process
takes. It reads far more often than usual, so that its cost stands out; the cost at one reading per
second is that times the interval.

Prints a table; the last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("tests", "tests/hardware", "workflow/scripts")
)

import nvml_stub
import psutil
from support import SCRIPTS, wait_for

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
    parser.add_argument("--seconds", type=float, default=60, help="of the monitor")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between readings")
    args = parser.parse_args()
    without, own = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, dict(os.environ)
    with tempfile.TemporaryDirectory() as name:
        folder, card = Path(name), "this machine's card"
        without_s, _, _ = time_reading(without)
        wall_s, cpu_s, has_card = time_reading(own)
        if not has_card:
            card = "a stub of the driver"
            own = nvml_stub.environment(nvml_stub.build(folder), nvml_stub.write(folder))
            wall_s, cpu_s, _ = time_reading(own)
        share = measure_monitor(folder, own, args.seconds, args.interval)
    result: dict[str, Any] = {
        "reading_without_card_s": without_s,
        "reading_with_card_s": wall_s,
        "reading_with_card_cpu_s": cpu_s,
        "card": card,
        "monitor_share_of_a_core": share,
        "interval_s": args.interval,
        "monitor_share_of_a_core_at_1_s": share * args.interval,
    }
    for key, value in result.items():
        print(f"{key:<32}{value if isinstance(value, str) else f'{value:.6g}'}")
    print(json.dumps(result))


def time_reading(environment: dict[str, str]) -> tuple[float, float, bool]:
    """Return wall and CPU seconds of one reading, and whether there is a card."""
    environment = {**environment, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", READINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall_s, cpu_s, has_card = json.loads(done.stdout)
    return wall_s, cpu_s, has_card


def measure_monitor(
    folder: Path, environment: dict[str, str], seconds: float, interval_s: float
) -> float:
    """Return the share of a core that the monitor takes from its first reading on."""
    samples = folder / "samples.jsonl"
    command = [sys.executable, str(SCRIPTS / "monitor_gpu.py"), "--quiet"]
    command += ["--samples", str(samples), "--output", str(folder / "monitor.json")]
    command += ["--interval", str(interval_s)]
    with psutil.Popen(command, env=environment) as monitor:
        try:
            wait_for(lambda: samples.is_file() and samples.read_bytes(), during=monitor)
            before, start = monitor.cpu_times(), time.perf_counter()
            time.sleep(seconds)
            after, wall_s = monitor.cpu_times(), time.perf_counter() - start
        finally:
            monitor.terminate()
    used_s = (after.user - before.user) + (after.system - before.system)
    return used_s / wall_s


if __name__ == "__main__":
    main()
