"""Timestamps between steps, on the device if it is a card; needs only torch."""

import time
from itertools import pairwise
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
