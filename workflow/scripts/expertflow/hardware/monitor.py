"""Read a machine's figures while something runs on it, at an interval that suits its epochs."""

import argparse
import itertools
import json
import logging
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from expertflow.core.files import read_json_lines
from expertflow.core.locks import try_lock
from expertflow.core.process import record_signals
from expertflow.core.records import from_json, read_record, write_record
from expertflow.hardware.nvml import QUESTIONS, Device, Gpus, open_gpus
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.hardware.summary import (
    Watcher,
    add_processes,
    describe_card,
    no_card,
    summarize,
)

log = logging.getLogger(__name__)

LONGEST_NAP_S = 0.2
# Next to a training on a busy machine, the trainer takes precedence.
NICE = 5
# The goal: at least 20 readings per epoch, from one to ten per second. Readings come late on a busy
# machine and epochs differ, so a fifth more are planned (judgment).
N_WANTED, FAST_S, SLOW_S, SPARE = 20, 0.1, 1.0, 1.2
TAIL_BYTES = 1 << 14

# The system's disk table is the most expensive thing to read; a little less than a second, so that
# each reading has it if they are a second apart.
DISK_EVERY_S = 0.9
# Fields of a reading that are figures of the card.
CARD_FIGURES = [name for name in GpuSample.__struct_fields__ if name in QUESTIONS]


class Sampler:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._disk: tuple[int, int] | None = None
        self._disk_due_s = 0.0
        self._is_first = True

    def read_sample(self, *, elapsed_s: float) -> GpuSample:
        """Read everything; the first reading has no shares of time, which need an earlier one."""
        starts, self._is_first = self._is_first, False
        cpu_percent = psutil.cpu_percent(interval=None)
        read, written = self._disk_since()
        devices = self._gpus.devices
        return GpuSample(
            elapsed_s=round(elapsed_s, 3),
            **(_card_figures(devices) if devices else {}),
            # psutil answers 0.0 to its first call.
            cpu_percent=None if starts else cpu_percent,
            ram_used_bytes=psutil.virtual_memory().used,
            disk_read_bytes=read,
            disk_write_bytes=written,
            starts=starts,
            simulated=self._gpus.simulated,
            # After the figures above, whose failures it collects.
            lost=devices[0].take_lost() if devices else {},
        )

    def _disk_since(self) -> tuple[int | None, int | None]:
        now_s = time.monotonic()
        if now_s < self._disk_due_s:
            return None, None
        self._disk_due_s = now_s + DISK_EVERY_S
        before, self._disk = self._disk, disk_counters()
        if before is None or self._disk is None:
            return None, None
        return self._disk[0] - before[0], self._disk[1] - before[1]


def disk_counters(blocks: Path = Path("/sys/block")) -> tuple[int, int] | None:
    """Return bytes read and written by real disks, not volumes on them; null if uncounted."""
    try:
        disks = psutil.disk_io_counters(perdisk=True)
    except NotImplementedError:
        return None
    # In /sys/block, a slash in a name is an exclamation mark.
    names = [name for name in disks if (blocks / name.replace("/", "!") / "device").exists()]
    if not names:
        return None
    return sum(disks[n].read_bytes for n in names), sum(disks[n].write_bytes for n in names)


def _card_figures(devices: Sequence[Device]) -> dict[str, Any]:
    first = devices[0]
    figures, _ = first.read_figures(*CARD_FIGURES)
    figures["utilization_percent"] = first.read_figure("any_kernel_percent")
    figures |= {name: round(value, 2) for name, value in first.read_counters().items()}
    for total, name in (("energy_all_j", "energy_j"), ("power_all_w", "power_w")):
        values = [figures[name], *(device.read_figure(name) for device in devices[1:])]
        # A sum that lacks a card would be too low.
        figures[total] = None if None in values else round(sum(values), 3)
    return figures


class SamplingInterval(msgspec.Struct):
    """Chooses the time to the next reading: ``configured_s``, or at least 20 per epoch.

    Readings are dense until ``steps``, the trainer's log, shows an epoch; without it, one a second.
    """

    configured_s: float | None = None
    steps: Path | None = None
    n_steps_per_epoch: int | None = None
    epoch_s: float | None = None
    _seen: tuple[int, int] = (0, 0)

    def next_s(self) -> float:
        if self.configured_s is not None:
            return self.configured_s
        if self.steps is None or self.n_steps_per_epoch is None:
            return SLOW_S
        self._update(self.steps, self.n_steps_per_epoch)
        if self.epoch_s is None:
            return FAST_S
        return min(SLOW_S, max(FAST_S, self.epoch_s / (N_WANTED * SPARE)))

    def _update(self, path: Path, n_steps: int) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        now = (status.st_size, status.st_mtime_ns)
        if now == self._seen:
            return
        self._seen = now
        # The first line may be incomplete.
        lines = read_json_lines(path, tail_bytes=TAIL_BYTES)
        steps = [x for x in lines if isinstance(x, dict) and {"step", "elapsed_s"} <= x.keys()]
        times = [
            (later["elapsed_s"] - earlier["elapsed_s"]) / (later["step"] - earlier["step"])
            for earlier, later in itertools.pairwise(steps)
            if later["step"] > earlier["step"] and later["elapsed_s"] > earlier["elapsed_s"]
        ]
        if times:
            # A pause for an evaluation or a save does not move the median.
            self.epoch_s = statistics.median(times) * n_steps


def run_command(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
    """Compare two summaries, or monitor; ``refuse`` exits with a usage error."""
    # rich is imported late: next to a training nothing is shown, and the monitor starts at once.
    if args.compare is not None:
        from expertflow.hardware.show import print_comparison

        before, after = args.compare
        names = (before.stem, after.stem) if before.stem != after.stem else ("before", "after")
        old, new = (read_record(MonitorRecord, path) for path in args.compare)
        print_comparison(old, new, names)
        return
    if args.output is None:
        refuse("--output is missing; set it to the file for the summary")
    if args.interval is not None and not 0 < args.interval < math.inf:
        refuse(f"--interval is {args.interval:g}; set it to seconds above 0")
    readings = args.samples or args.output.with_suffix(".jsonl")
    if args.output.resolve() == readings.resolve():
        refuse(f"--output is {args.output}, the file of readings; choose another name, as .json")
    if args.n_gpus is not None and args.n_gpus < 1:
        refuse(f"--n-gpus is {args.n_gpus}; set it to 1 or more")
    with ExitStack() as held:
        record = _watch(args, readings, held)
        write_record(args.output, record)
    if not args.quiet:
        from expertflow.hardware.show import print_record

        print_record(record)


def _watch(args: argparse.Namespace, samples: Path, held: ExitStack) -> MonitorRecord:
    # Passed in, not queried here: the parent may have ended before this process started.
    parent: int | None = args.with_parent
    samples.parent.mkdir(parents=True, exist_ok=True)
    stream = held.enter_context(samples.open("a"))
    if try_lock(stream) == "held":
        # The monitor of a killed training, writing its last reading.
        log.warning("%s: waiting for another monitor, which is still writing", samples)
        try_lock(stream, wait=True)
    if parent not in (None, os.getppid()):
        # By now, these files may belong to the session that continues.
        raise SystemExit(f"process {parent}, which should be monitored, has ended")
    end_s = math.inf if args.duration is None else time.monotonic() + args.duration
    signals = held.enter_context(record_signals(ignorable=(signal.SIGHUP,)))
    if parent is not None:
        os.nice(NICE)
    watcher = None
    if not args.quiet:
        from expertflow.hardware.show import show_live

        watcher = held.enter_context(show_live())
    return monitor_machine(
        samples,
        interval=SamplingInterval(
            args.interval, steps=args.steps, n_steps_per_epoch=args.steps_per_epoch
        ),
        zero_s=args.zero,
        goes_on=args.go_on,
        stop=lambda: (
            bool(signals) or time.monotonic() > end_s or parent not in (None, os.getppid())
        ),
        n_gpus=args.n_gpus,
        watcher=watcher,
    )


def monitor_machine(
    output: Path,
    *,
    interval: SamplingInterval,
    stop: Callable[[], bool],
    zero_s: float | None = None,
    goes_on: bool = False,
    n_gpus: int | None = None,
    watcher: Watcher | None = None,
) -> MonitorRecord:
    """Append one JSON line per reading to ``output`` until ``stop`` returns true.

    ``zero_s`` is the Unix time at which the clock of the monitored run was zero. A resumed run
    ``goes_on`` with its file, and the summary covers all of it.
    """
    with open_gpus(n_gpus) as gpus:
        card, sampler = describe_card(gpus), Sampler(gpus)
        output.parent.mkdir(parents=True, exist_ok=True)
        if goes_on and output.is_file():
            _drop_cut_line(output)
        start_s, cpu_s = time.monotonic(), time.process_time()
        offset_s = 0.0 if zero_s is None else time.time() - zero_s
        with output.open("a" if goes_on else "w", encoding="utf-8") as readings:
            going = True
            while going:
                # Checked before the reading: the last one comes at the end, so counters cover all.
                going, now_s = not stop(), time.monotonic()
                sample = sampler.read_sample(elapsed_s=offset_s + now_s - start_s)
                readings.write(json.dumps(msgspec.to_builtins(sample)) + "\n")
                readings.flush()
                if watcher is not None:
                    watcher(sample, card)
                due_s = now_s + interval.next_s()
                while going and not stop() and (left_s := due_s - time.monotonic()) > 0:
                    time.sleep(min(left_s, LONGEST_NAP_S))
        wall_s = time.monotonic() - start_s
        fraction = (time.process_time() - cpu_s) / wall_s if wall_s > 0 else None
        card = add_processes(card, gpus)
    samples = read_samples(output)
    return summarize(
        samples,
        card=card,
        configured_s=interval.configured_s,
        monitor_cpu_fraction=fraction,
    )


def write_missing_record(
    path: Path, samples: Path, *, configured_s: float | None, reason: str
) -> None:
    _drop_cut_line(samples)
    card = no_card(reason)
    write_record(path, summarize(read_samples(samples), card=card, configured_s=configured_s))


def _drop_cut_line(path: Path) -> None:
    """Remove a line that a crash cut short: it is not a reading, and the report rejects it."""
    with path.open("rb+") as stream:
        stream.truncate(stream.read().rfind(b"\n") + 1)


def read_samples(path: Path) -> list[GpuSample]:
    where = f"{path}: not a reading of the monitor"
    return [from_json(GpuSample, line, where=where) for line in read_json_lines(path)]
