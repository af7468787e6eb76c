#!/usr/bin/env python3
"""Pack what was made from an opened bundle into one verified file to take home."""

import os
import sys
from pathlib import Path

from expertflow.core import cli
from expertflow.core.attempts import find_final_error
from expertflow.core.errors import ConfigError
from expertflow.rental.bundle.pack import pack_outcome
from expertflow.rental.bundle.tar import write_bundle


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("expert")
    parser.add_argument("--directory", type=Path, default=Path(), help="where Snakemake ran")
    parser.add_argument("--output", type=Path, required=True, help="outcome.tar to write")
    parser.add_argument("--code", type=int, default=0, help="exit code of its run; packed if 0")
    args = parser.parse_args()
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such folder; pass the one where Snakemake ran")
    if args.code:
        logs = args.directory / "results" / args.expert / "logs"
        sys.exit(find_final_error(logs) or args.code)
    output = args.output.absolute()
    os.chdir(args.directory)
    write_bundle(output, *pack_outcome(args.expert))


if __name__ == "__main__":
    cli.run(main)
