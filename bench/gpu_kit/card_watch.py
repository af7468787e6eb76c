"""The card's state while a part is measured: clocks, power, temperature, other processes."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

from expertflow.hardware.records import MonitorRecord


@contextmanager
def watch_card(device: str, samples: Path) -> Iterator[dict[str, Any]]:
    """Monitor the card during a block; the result has its figures, or why there are none."""
    found: dict[str, Any] = {}
    if device == "cpu" or find_spec("pynvml") is None:
        found["unavailable"] = "no card" if device == "cpu" else "nvidia-ml-py is not installed"
        yield found
        return
    from expertflow.hardware.monitor import SamplingInterval, monitor_machine

    done, interval = Event(), SamplingInterval(0.25)
    with ThreadPoolExecutor(1) as pool:
        watching = partial(monitor_machine, interval=interval, stop=done.is_set, n_gpus=1)
        record = pool.submit(watching, samples)
        try:
            yield found
        finally:
            done.set()
        found |= figures(record.result())


def figures(record: MonitorRecord) -> dict[str, Any]:
    """Return the figures that show whether a measurement was undisturbed."""
    names = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
    spreads = {name: getattr(record, name) for name in names}
    return {
        **{name: s and {"mean": s.mean, "min": s.min, "max": s.max} for name, s in spreads.items()},
        "driver": record.driver,
        "power_limit_w": record.power_limit_w,
        "throttle_s": record.throttle_s,
        "n_samples": record.n_samples,
        "other_processes": [p for p in record.processes if p["pid"] != os.getpid()],
        "unavailable": record.unavailable,
    }
