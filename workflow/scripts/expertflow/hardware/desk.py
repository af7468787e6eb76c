"""Serve a request to the monitor's script: watch, replay, or compare."""

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from expertflow.core.records import read_record, write_record
from expertflow.hardware.monitor import monitor, replay
from expertflow.hardware.pace import Pace
from expertflow.hardware.records import MonitorRecord

# Beside a training on a full machine, the trainer goes first.
NICE = 5


def serve(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
    """Do what was asked; ``refuse`` ends the script with a message about its arguments."""
    if args.compare is not None:
        _compare(*args.compare)
        return
    if args.output is None:
        refuse("--output is missing: where to write the summary")
    if args.interval is not None and args.interval <= 0:
        refuse(f"--interval is {args.interval:g}: give seconds above 0")
    readings = args.replay or args.samples or args.output.with_suffix(".jsonl")
    if args.output.resolve() == readings.resolve():
        refuse(f"--output is {args.output}, where the readings are; give it another name, as .json")
    if args.n_gpus is not None and args.n_gpus < 1:
        refuse(f"--n-gpus is {args.n_gpus}: give 1 or more")
    record = replay(readings, args.facts) if args.replay is not None else _watch(args, readings)
    write_record(args.output, record)
    if not args.quiet:
        from rich.console import Console

        from expertflow.hardware.show import print_record

        print_record(record, Console())


def _watch(args: argparse.Namespace, samples: Path) -> MonitorRecord:
    came: list[int] = []
    # Given, not asked for here: the parent may be gone before this process is up.
    parent: int | None = args.with_parent
    if parent not in (None, os.getppid()):
        # By now these files may be those of the session that goes on.
        raise SystemExit(f"process {parent}, which was to be watched, has ended")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: came.append(received))
    if parent is not None:
        os.nice(NICE)

    def look(watcher: Callable[..., None] | None) -> MonitorRecord:
        return monitor(
            samples,
            pace=Pace(args.interval, steps=args.steps, n_steps_per_epoch=args.steps_per_epoch),
            duration_s=args.duration,
            zero_s=args.zero,
            goes_on=args.go_on,
            stop=lambda: bool(came) or parent not in (None, os.getppid()),
            gpu=args.gpu,
            n_gpus=args.n_gpus,
            watcher=watcher,
        )

    if args.quiet:
        return look(None)
    # Imported here: beside a training nothing is shown, and the monitor should be up at once.
    from expertflow.hardware.show import live, stderr

    with live(stderr()) as watcher:
        return look(watcher)


def _compare(before: Path, after: Path) -> None:
    from rich.console import Console

    from expertflow.hardware.show import print_comparison

    records = [read_record(MonitorRecord, path) for path in (before, after)]
    names = (before.stem, after.stem) if before.stem != after.stem else ("before", "after")
    print_comparison(records[0], records[1], Console(), names)
