"""Timestamps between steps, on the device if it is a card, and memory; needs only torch."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


def wait(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: list[Any], device: str) -> list[float]:
    cuda = device == "cuda"
    return [a.elapsed_time(b) / 1000 if cuda else b - a for a, b in pairwise(marks)]


def peak_resident_bytes() -> int:
    """Return the peak since the program started; ``ru_maxrss`` is inherited from the parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
