#!/usr/bin/env python3
"""Generate files from declarations: JSON Schemas of settings and report, docs/settings.md."""

from pathlib import Path

from expertflow.config.settings_files import render_files
from expertflow.core import cli
from expertflow.core.files import write_text

ROOT = Path(__file__).parents[2]


def main() -> None:
    cli.parser(__doc__).parse_args()
    for path, text in render_files(ROOT).items():
        if not path.is_file() or path.read_text("utf-8") != text:
            write_text(path, text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    cli.run(main)
