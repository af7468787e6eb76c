#!/usr/bin/env python3
"""Make a local, hub or git source readable on this disk, at its locked version."""

from expertflow.core import cli
from expertflow.data.fetch import fetch_source
from expertflow.data.records import ExpertLock
from expertflow.data.settings import FetchSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        FetchSpec,
        lock=ExpertLock,
        directory="where extracted files go",
        output="record to write",
    )
    pinned = next(s for s in job.lock.sources if s.name == job.spec.source.name)
    job.write(fetch_source(job.spec, pinned, job.directory))


if __name__ == "__main__":
    cli.run(main)
