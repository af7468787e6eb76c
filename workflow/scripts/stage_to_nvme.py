#!/usr/bin/env python3
"""Copy packed rows and base weights to a fast local disk, or report why not."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingRecord


def main() -> None:
    job = cli.stage(
        __doc__,
        StageSpec,
        expert={"required": True},
        packing=PackingRecord,
        rows="folder of packed rows",
        model="model.json",
        output="staging.json to write",
    )
    base = Path(read_part(str, job.model, "path"))
    weights_sha256 = read_part(str, job.model, "weights_sha256")
    key = rows_key(job.packing.train.sha256, job.packing.held_out.sha256)
    record = plan_staging(
        expert=job.expert,
        spec=job.spec,
        rows=read_content("rows", job.rows, key),
        weights=read_content("weights", base, weights_key(base, weights_sha256)),
    )
    job.write(record)


if __name__ == "__main__":
    cli.run(main)
