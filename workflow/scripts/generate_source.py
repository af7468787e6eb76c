#!/usr/bin/env python3
"""Run the generator of a source, at its locked version."""

from expertflow.core import cli
from expertflow.data.fetch import fetch_source
from expertflow.data.records import ExpertLock
from expertflow.data.settings import FetchSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        FetchSpec,
        lock=ExpertLock,
        directory="where the records go",
        output="record to write",
    )
    pinned = next(s for s in job.lock.sources if s.name == job.spec.source.name)
    job.write(fetch_source(job.spec, pinned, job.directory))


if __name__ == "__main__":
    cli.run(main)
