#!/usr/bin/env python3
"""List data sets: what this machine's caches hold, and the sources that the experts name.

    python workflow/scripts/find_datasets.py [--preset demo|full|both] [--json]

As part of the workflow, with --spec: describe one expert's sources and plan their shards.
"""

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.records import ExpertLock, SourceRecord
from expertflow.data.shards import find_datasets


def main() -> None:
    in_workflow = any(argument.split("=")[0] == "--spec" for argument in sys.argv)
    (describe_sources if in_workflow else print_catalogue)()


def describe_sources() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="sources.lock.json")
    parser.add_argument("--sources", type=Path, nargs="+", required=True, help="source records")
    parser.add_argument("--output", type=Path, required=True, help="datasets.json to write")
    args = parser.parse_args()
    spec = json.loads(args.spec)
    manifest = find_datasets(
        expert=spec["expert"],
        preset=spec["preset"],
        licences=spec["licences"],
        lock=read_record(ExpertLock, args.lock),
        sources=[read_record(SourceRecord, path) for path in args.sources],
    )
    write_record(args.output, manifest)
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


def print_catalogue() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("demo", "full", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="print JSON for other programs")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in a pipe to head
    # Loaded by name: the workflow's use of this script does not depend on how tables look.
    shown = importlib.import_module("expertflow.config.catalogue_tables")
    shown.show(args.preset, as_json=args.json, basedir=Path(__file__).resolve().parents[2])


if __name__ == "__main__":
    cli.run(main)
