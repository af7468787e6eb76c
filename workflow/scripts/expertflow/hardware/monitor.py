"""Watch the machine beside whatever runs on it, and sum up what was seen.

On a machine without an NVIDIA GPU the card's figures are null with the reason, and CPU, memory and
disks are recorded all the same. Energy is the difference of the card's own counter, not a sum of
powers.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from expertflow.core.errors import DataError
from expertflow.core.files import read_json_lines
from expertflow.core.records import from_json, read_record, write_record
from expertflow.hardware.nvml import open_gpus
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.hardware.sampler import Sampler, SamplingInterval
from expertflow.hardware.summary import (
    Card,
    at_the_end,
    describe,
    from_record,
    no_card,
    summarise,
)

LONGEST_NAP_S = 0.2
Watcher = Callable[[GpuSample, Card], None]


def monitor(
    output: Path,
    *,
    interval: SamplingInterval,
    duration_s: float | None,
    zero_s: float | None,
    goes_on: bool,
    stop: Callable[[], bool],
    gpu: str | None = None,
    n_gpus: int | None = None,
    watcher: Watcher | None = None,
) -> MonitorRecord:
    """Append one JSON line per reading to ``output`` until the time is over or ``stop`` says so.

    ``zero_s`` is the moment (Unix time) at which the clock of what is watched stood at zero; null:
    now. A resumed run ``goes_on`` with its file, and the summary covers all of it. ``gpu`` picks a
    card that is not the first visible one, ``n_gpus`` takes the first ones only.
    """
    with open_gpus(gpu, n_gpus) as gpus:
        card, sampler = describe(gpus), Sampler(gpus)
        output.parent.mkdir(parents=True, exist_ok=True)
        if goes_on:
            _end_last_line(output)
        start, cpu_s = time.monotonic(), time.process_time()
        offset_s = 0.0 if zero_s is None else time.time() - zero_s
        end = None if duration_s is None else start + duration_s
        with output.open("a" if goes_on else "w", encoding="utf-8") as stream:
            going = True
            while going:
                # Asked before the reading: the stretch ends with one, so that counters cover all.
                going = not stop() and (end is None or time.monotonic() < end)
                sample = sampler.take(elapsed_s=offset_s + time.monotonic() - start)
                stream.write(json.dumps(msgspec.to_builtins(sample)) + "\n")
                stream.flush()
                if watcher is not None:
                    watcher(sample, card)
                taken_at = offset_s + time.monotonic() - start - sample.elapsed_s
                if going:
                    _nap(interval.next_s() - taken_at, end, stop)
        wall_s = time.monotonic() - start
        fraction = (time.process_time() - cpu_s) / wall_s if wall_s > 0 else None
        card = at_the_end(card, gpus)
    samples = read_samples(output)
    return summarise(samples, card=card, interval=interval, monitor_cpu_fraction=fraction)


def replay(trace: Path, facts: Path | None) -> MonitorRecord:
    """Sum up a recorded series again; ``facts`` is the record of the card it was taken from.

    Raises:
        DataError: the trace is missing or holds no readings.
    """
    if not trace.is_file():
        raise DataError(f"{trace}: no such trace; give the .jsonl that the monitor wrote")
    samples = read_samples(trace)
    if not samples:
        raise DataError(f"{trace}: holds no readings; give the .jsonl that the monitor wrote")
    if facts is None:
        card = no_card("a replay cannot ask the card; give its record with --facts")
        interval = SamplingInterval()
    else:
        record = read_record(MonitorRecord, facts)
        card = from_record(record)
        interval = SamplingInterval(record.configured_interval_s, epoch_s=record.epoch_s)
    remarks = (f"replayed from {trace.name}",)
    return summarise(samples, card=card, interval=interval, remarks=remarks)


def write_missing_record(
    path: Path, samples: Path, *, configured_s: float | None, reason: str
) -> None:
    """Write a record where the monitor left none: what its readings tell, nulls with the reason."""
    interval = SamplingInterval(configured_s)
    write_record(path, summarise(read_samples(samples), card=no_card(reason), interval=interval))


def _end_last_line(path: Path) -> None:
    """Close a line that a crash cut short, so that it takes no later reading with it."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as stream:
            stream.seek(-1, os.SEEK_END)
            if stream.read() != b"\n":
                stream.write(b"\n")


def read_samples(path: Path) -> list[GpuSample]:
    """Read a file of readings; a line that a crash cut short is left out.

    Raises:
        DataError: a line is none of the monitor's.
    """
    where = f"{path}: not a reading of the monitor"
    return [from_json(GpuSample, line, where=where) for line in read_json_lines(path)]


def _nap(left_s: float, end: float | None, stop: Callable[[], bool]) -> None:
    """Sleep in short naps, so that a stop takes effect soon."""
    due = time.monotonic() + left_s
    if end is not None:
        due = min(due, end)
    while not stop() and (left_s := due - time.monotonic()) > 0:
        time.sleep(min(left_s, LONGEST_NAP_S))
