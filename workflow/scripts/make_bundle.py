#!/usr/bin/env python3
"""Pack all that a GPU box needs from staging to the report into one verified file."""

from pathlib import Path

from expertflow.core import cli
from expertflow.rental.bundle.contents import pack
from expertflow.rental.bundle.records import BundleSpec
from expertflow.rental.bundle.tar import write_bundle
from expertflow.report.provenance import git_commit


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="bundle.tar to write")
    args = parser.parse_args()
    spec = cli.spec_from_text(BundleSpec, args.spec)
    index, items = pack(spec, git=git_commit())
    write_bundle(args.output, index, items)


if __name__ == "__main__":
    cli.run(main)
