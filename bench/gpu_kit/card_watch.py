"""The card's state while a part is measured: clocks, power, temperature, other processes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any

from expertflow.hardware.records import GpuSample, MonitorRecord

INTERVAL_S = 0.25


@contextmanager
def watch_card(device: str) -> Iterator[dict[str, Any]]:
    """Sample the card during a block; the result has its figures, or why there are none."""
    found: dict[str, Any] = {}
    if device == "cpu" or find_spec("pynvml") is None:
        found["unavailable"] = "no card" if device == "cpu" else "nvidia-ml-py is not installed"
        yield found
        return
    from expertflow.hardware.monitor import Sampler
    from expertflow.hardware.nvml import open_gpus
    from expertflow.hardware.summary import add_processes, describe_card, summarize

    with open_gpus(n_gpus=1) as gpus:
        samples: list[GpuSample] = []
        done, sampler, start_s = Event(), Sampler(gpus), time.monotonic()

        def sample() -> None:
            while not done.wait(INTERVAL_S):
                samples.append(sampler.read_sample(elapsed_s=time.monotonic() - start_s))

        thread = Thread(target=sample)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()
        card = add_processes(describe_card(gpus), gpus)
        found |= figures(summarize(samples, card=card, configured_s=INTERVAL_S))


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
