#!/usr/bin/env python3
"""Pack everything a GPU machine needs, from staging to the report, into one verified file."""

from expertflow.core import cli
from expertflow.rental.bundle.pack import pack_bundle
from expertflow.rental.bundle.records import BundleSpec
from expertflow.rental.bundle.tar import write_bundle


def main() -> None:
    job = cli.stage(__doc__, BundleSpec, output="bundle.tar to write")
    write_bundle(job.output, *pack_bundle(job.spec))


if __name__ == "__main__":
    cli.run(main)
