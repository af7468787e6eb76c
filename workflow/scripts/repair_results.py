#!/usr/bin/env python3
"""Remove damaged files below results/ and state/, so that the next run makes it again.

The record that lists a file is removed with it, as is the report. Unknown files stay.
"""

from pathlib import Path

from expertflow.config.damage import find_problems, repair
from expertflow.core import cli


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="folder with results/")
    parser.add_argument("--dry-run", action="store_true", help="only list them")
    args = parser.parse_args()
    problems, summary = find_problems(args.folder)
    for line in (*problems, summary):
        print(line)
    for path in repair(problems, dry_run=args.dry_run):
        print(f"{'would remove' if args.dry_run else 'removed'} {path}")


if __name__ == "__main__":
    cli.run(main)
