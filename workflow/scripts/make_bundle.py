#!/usr/bin/env python3
"""Pack everything a GPU machine needs, from staging to the report, into one verified file."""

from pathlib import Path

from expertflow.core import cli
from expertflow.rental.bundle.pack import pack_bundle
from expertflow.rental.bundle.records import BundleSpec
from expertflow.rental.bundle.tar import write_bundle


def main(spec: BundleSpec, output: Path) -> None:
    write_bundle(output, *pack_bundle(spec))


if __name__ == "__main__":
    cli.run_stage(main)
