#!/usr/bin/env python3
"""Compare the reports of several experts: index.json and index.html."""

import os
from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import write_text
from expertflow.report.check import read_report
from expertflow.report.compare import build_index, index_row, render_index


def main(reports: list[Path], html: Path) -> object:
    rows = [index_row(read_report(path)) for path in reports]
    pages = [os.path.relpath(path.with_suffix(".html"), html.parent) for path in reports]
    write_text(html, render_index(rows, pages))
    return build_index(rows)


if __name__ == "__main__":
    cli.run_stage(main)
