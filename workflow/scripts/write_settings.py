#!/usr/bin/env python3
"""Generate files from declarations: JSON Schemas of settings and report, docs/settings.md.

With --check nothing is written, and the exit code is 1 if a file is out of date.
"""

import sys
from pathlib import Path

from expertflow.config.settings_files import render_files
from expertflow.core import cli
from expertflow.core.files import write_text

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="list what is out of date; exit code 1"
    )
    args = parser.parse_args()
    files = render_files(ROOT)
    stale = [p for p, text in files.items() if not p.is_file() or p.read_text("utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if args.check:
            print(f"{name} is out of date; run workflow/scripts/write_settings.py")
        else:
            write_text(path, files[path])
            print(f"wrote {name}")
    sys.exit(bool(stale and args.check))


if __name__ == "__main__":
    cli.run(main)
