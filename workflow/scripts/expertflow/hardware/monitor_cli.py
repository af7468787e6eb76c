"""The monitor's command: watch, replay, or compare."""

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from expertflow.core.locks import try_lock
from expertflow.core.records import read_record, write_record
from expertflow.hardware.monitor import monitor, replay
from expertflow.hardware.records import MonitorRecord
from expertflow.hardware.sampler import SamplingInterval

log = logging.getLogger(__name__)

# Beside a training on a full machine, the trainer goes first.
NICE = 5
SHORT_NAP_S = 0.02


def run_command(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
    """Run what was asked for; ``refuse`` ends the script with a message about its arguments."""
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
    with ExitStack() as held:
        watch = args.replay is None
        record = _watch(args, readings, held) if watch else replay(readings, args.facts)
        write_record(args.output, record)
    if not args.quiet:
        from rich.console import Console

        from expertflow.hardware.show import print_record

        print_record(record, Console())


def _watch(args: argparse.Namespace, samples: Path, held: ExitStack) -> MonitorRecord:
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

    def stop() -> bool:
        return bool(came) or parent not in (None, os.getppid())

    wait_for_others(held, samples, stop)

    def look(watcher: Callable[..., None] | None) -> MonitorRecord:
        return monitor(
            samples,
            interval=SamplingInterval(
                args.interval, steps=args.steps, n_steps_per_epoch=args.steps_per_epoch
            ),
            duration_s=args.duration,
            zero_s=args.zero,
            goes_on=args.go_on,
            stop=stop,
            gpu=args.gpu,
            n_gpus=args.n_gpus,
            watcher=watcher,
        )

    if args.quiet:
        return look(None)
    # Imported here: beside a training nothing is shown, and the monitor should be up at once.
    from rich.console import Console

    from expertflow.hardware.show import live

    with live(Console(stderr=True)) as watcher:
        return look(watcher)


def wait_for_others(held: ExitStack, samples: Path, stop: Callable[[], bool]) -> None:
    """Hold the readings until the record is written.

    A monitor whose training was killed is still at its last reading and its record while the next
    session of that training begins; they would end up among the new one's.
    """
    samples.parent.mkdir(parents=True, exist_ok=True)
    stream = held.enter_context(samples.open("a"))
    if try_lock(stream) != "held":
        return
    log.warning("%s: waiting for another monitor, which still writes there", samples)
    while try_lock(stream) == "held":
        if stop():
            raise SystemExit(f"{samples}: another monitor still writes there; nothing was watched")
        time.sleep(SHORT_NAP_S)


def _compare(before: Path, after: Path) -> None:
    from rich.console import Console

    from expertflow.hardware.show import print_comparison

    records = [read_record(MonitorRecord, path) for path in (before, after)]
    names = (before.stem, after.stem) if before.stem != after.stem else ("before", "after")
    print_comparison(records[0], records[1], Console(), names)
