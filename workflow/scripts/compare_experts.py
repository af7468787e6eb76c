#!/usr/bin/env python3
"""Compare the reports of several experts: index.json and index.html."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import write_record
from expertflow.report.check import read_report
from expertflow.report.compare import build_index, index_row, render_index


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--reports", type=Path, nargs="+", required=True, help="report.json files")
    parser.add_argument("--json", type=Path, required=True, help="index.json to write")
    parser.add_argument("--html", type=Path, required=True, help="index.html to write")
    args = parser.parse_args()
    rows = [index_row(read_report(path)) for path in args.reports]
    write_text(args.html, render_index(rows))
    write_record(args.json, build_index(rows))


if __name__ == "__main__":
    cli.run(main)
