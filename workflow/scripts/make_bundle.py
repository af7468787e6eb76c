#!/usr/bin/env python3
"""Pack all that a GPU machine needs from staging to the report into one verified file."""

from pathlib import Path

from expertflow.core import cli
from expertflow.rental.bundle.contents import pack_bundle
from expertflow.rental.bundle.records import BundleSpec
from expertflow.rental.bundle.tar import write_bundle


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="bundle.tar to write")
    args = parser.parse_args()
    write_bundle(args.output, *pack_bundle(cli.spec_from_text(BundleSpec, args.spec)))


if __name__ == "__main__":
    cli.run(main)
