#!/usr/bin/env python3
"""Watch GPU, CPU and memory beside any training, and say what the figures suggest.

    python workflow/scripts/monitor_gpu.py --duration 60 --interval 1 --output monitor.json

"Any kernel" is the driver's utilisation: some kernel was running, which says nothing of how well
the card was used. Ends after --duration seconds, or on SIGTERM or Ctrl-C.
"""

import argparse
import os
import signal
from pathlib import Path

from rich.console import Console

from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.hardware.monitor import monitor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration", type=float, help="seconds; default: until stopped")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--output", type=Path, required=True, help="JSON summary to write")
    parser.add_argument("--samples", type=Path, help="JSONL of samples; default: beside the output")
    parser.add_argument("--offset", type=float, default=0.0, help="clock at the start, seconds")
    parser.add_argument("--with-parent", action="store_true", help="end when the parent does")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args()
    came: list[int] = []
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: came.append(received))
    record = monitor(
        args.samples or args.output.with_suffix(".jsonl"),
        interval_s=args.interval,
        duration_s=args.duration,
        offset_s=args.offset,
        stop=lambda: bool(came) or (args.with_parent and os.getppid() != parent),
    )
    write_record(args.output, record)
    if not args.quiet:
        Console().print_json(args.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    cli.run(main)
