"""Monitor the machine while something runs on it, summarize the readings, compare summaries."""

import argparse
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import msgspec

from expertflow.core.files import read_json_lines
from expertflow.core.locks import try_lock
from expertflow.core.process import record_signals
from expertflow.core.records import from_json, read_record, write_record
from expertflow.hardware.nvml import open_gpus
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.hardware.sampler import Sampler, SamplingInterval
from expertflow.hardware.summary import Watcher, add_processes, describe_card, no_card, summarize

log = logging.getLogger(__name__)

LONGEST_NAP_S = 0.2
# Next to a training on a busy machine, the trainer takes precedence.
NICE = 5


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
    return summarize(samples, card=card, interval=interval, monitor_cpu_fraction=fraction)


def write_missing_record(
    path: Path, samples: Path, *, configured_s: float | None, reason: str
) -> None:
    _drop_cut_line(samples)
    interval = SamplingInterval(configured_s)
    write_record(path, summarize(read_samples(samples), card=no_card(reason), interval=interval))


def _drop_cut_line(path: Path) -> None:
    """Remove a line that a crash cut short: it is not a reading, and the report rejects it."""
    with path.open("rb+") as stream:
        stream.truncate(stream.read().rfind(b"\n") + 1)


def read_samples(path: Path) -> list[GpuSample]:
    where = f"{path}: not a reading of the monitor"
    return [from_json(GpuSample, line, where=where) for line in read_json_lines(path)]
