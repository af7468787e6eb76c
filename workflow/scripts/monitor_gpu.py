#!/usr/bin/env python3
"""Monitor GPU, CPU, memory and disks during any training, and suggest improvements.

    python workflow/scripts/monitor_gpu.py --duration 60 --interval 1 --output monitor.json
    python workflow/scripts/monitor_gpu.py --compare before.json after.json

"Any kernel" is the driver's utilization: some kernel was running, however well it used the card.
Ends after --duration seconds, or on SIGTERM or Ctrl-C. See docs/monitoring.md.
"""

from pathlib import Path

from expertflow.core import cli
from expertflow.hardware import monitor


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--duration", type=float, help="seconds; default: until stopped")
    add("--interval", type=float, help="seconds between readings; default: 1, less with --steps")
    add("--output", type=Path, help="JSON summary to write")
    add("--samples", type=Path, help="JSONL of readings; default: next to the output")
    add("--n-gpus", type=int, help="only the first ones; default: all visible")
    add("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two summaries")
    add("--zero", type=float, help="Unix time of second 0; default: now")
    add("--go-on", action="store_true", help="append to existing readings")
    add("--steps", type=Path, help="the trainer's log of steps: at least 20 readings an epoch")
    add("--steps-per-epoch", type=int, help="steps of an epoch")
    add("--with-parent", type=int, metavar="PID", help="exit when this parent does")
    add("--quiet", action="store_true", help="print nothing")
    monitor.run_command(parser.parse_args(), parser.error)


if __name__ == "__main__":
    # The monitored process may number its cards by speed: the record says so.
    cli.run(main, by_bus=False)
