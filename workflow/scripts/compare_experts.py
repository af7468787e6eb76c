#!/usr/bin/env python3
"""Put the reports of several experts side by side: index.json and index.html."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.core.records import write_record
from expertflow.report.check.report import read_report, read_schema
from expertflow.report.compare import build_index, render_index

SCHEMA = Path(__file__).resolve().parents[1] / "schemas" / "report.schema.yaml"


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--reports", type=Path, nargs="+", required=True, help="report.json files")
    parser.add_argument("--json", type=Path, required=True, help="index.json to write")
    parser.add_argument("--html", type=Path, required=True, help="index.html to write")
    args = parser.parse_args()
    schema = read_schema(SCHEMA)
    index = build_index([read_report(path, schema) for path in args.reports])
    write_text(args.html, render_index(index))
    write_record(args.json, index)


if __name__ == "__main__":
    cli.run(main)
