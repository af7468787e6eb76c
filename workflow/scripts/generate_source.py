#!/usr/bin/env python3
"""Run the generator of a source, as its lock pins it."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_record, write_record
from expertflow.data.fetch import generate_source
from expertflow.data.records import ExpertLock
from expertflow.data.settings import FetchSpec


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="lock of the source")
    parser.add_argument("--directory", type=Path, required=True, help="where the records go")
    parser.add_argument("--output", type=Path, required=True, help="record to write")
    args = parser.parse_args()
    spec = cli.spec_from_text(FetchSpec, args.spec)
    lock = read_record(ExpertLock, args.lock)
    pinned = next(s for s in lock.sources if s.name == spec.source.name)
    write_record(args.output, generate_source(spec, pinned, args.directory))
    cli.write_sidecar(args.output, spec=args.spec, code=args.code)


if __name__ == "__main__":
    cli.run(main)
