#!/usr/bin/env python3
"""Describe this machine: processors, memory, GPUs, places for a fast copy.

    python workflow/scripts/probe_machine.py --output machine.json --measure-disks

Measuring writes 256 MiB to each disk with enough space, reads it back, and deletes it.
"""

from pathlib import Path

import yaml

from expertflow.config.read_yaml import read_yaml
from expertflow.core import cli
from expertflow.core.records import write_record
from expertflow.hardware.probe import probe_machine

TABLE = Path(__file__).resolve().parents[2] / "config" / "hardware" / "gpus.yaml"


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--output", type=Path, help="JSON record to write")
    parser.add_argument("--measure-disks", action="store_true", help="measure how fast they read")
    parser.add_argument("--gpus", type=Path, default=TABLE, help="table of known cards")
    args = parser.parse_args()
    machine = probe_machine(table=read_yaml(args.gpus)["gpus"], measure_disks=args.measure_disks)
    if args.output is not None:
        write_record(args.output, machine)
    print(yaml.safe_dump(machine, sort_keys=False), end="")


if __name__ == "__main__":
    cli.run(main)
