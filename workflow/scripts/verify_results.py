#!/usr/bin/env python3
"""Read every file below results/ and state/, and list what is damaged, missing or unknown.

Works on copied results without Snakemake's own records. Exits with 1 if there are any.
"""

import sys
from pathlib import Path

from expertflow.config.damage import describe_other_code, find_problems
from expertflow.core import cli


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="folder with results/")
    cli.stop_with_reader()
    problems, summary = find_problems(parser.parse_args().folder)
    for line in (*describe_other_code(), *problems, summary):
        print(line)
    sys.exit(bool(problems))


if __name__ == "__main__":
    cli.run(main)
