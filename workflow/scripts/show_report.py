#!/usr/bin/env python3
"""Print finished reports in a few lines each: the verdict, eight figures, and their location."""

from pathlib import Path

from expertflow.core import cli
from expertflow.report.check import read_report
from expertflow.report.summary import print_summary


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="report.json files, or their folders")
    given = parser.parse_args().reports
    cli.stop_with_reader()
    for path in (p if p.suffix == ".json" else p / "report.json" for p in given):
        print_summary(read_report(path), html_path=path.with_suffix(".html"))


if __name__ == "__main__":
    cli.run(main)
