#!/usr/bin/env python3
"""List data sets: in this machine's caches, and the sources of the experts.

    python workflow/scripts/find_datasets.py [--json]

With --spec, as a workflow step: describe one expert's sources.
"""

import importlib
import sys
from typing import Any

from expertflow.core import cli
from expertflow.data.records import DatasetManifest, SourceRecord
from expertflow.data.shards import find_datasets


def main(spec: dict[str, Any], sources: list[SourceRecord]) -> DatasetManifest:
    return find_datasets(**spec, sources=sources)


def print_catalog() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON for other programs")
    args = parser.parse_args()
    cli.stop_with_reader()
    # Imported on demand: the workflow step does not depend on how tables look.
    module = importlib.import_module("expertflow.config.catalog")
    module.show_catalog(as_json=args.json)


if __name__ == "__main__":
    if any(argument.split("=")[0] == "--spec" for argument in sys.argv):
        cli.run_stage(main)
    cli.run(print_catalog)
