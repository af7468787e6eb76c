#!/usr/bin/env python3
"""Print ten lines from finished reports: verdict, scores, speed, time, cost, and where they lie."""

import argparse
import json
from pathlib import Path

from expertflow.core import cli
from expertflow.report.summary import print_summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="report.json files")
    args = parser.parse_args()
    for path in args.reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        print_summary(report, json_path=path, html_path=path.with_suffix(".html"), console=None)


if __name__ == "__main__":
    cli.run(main)
