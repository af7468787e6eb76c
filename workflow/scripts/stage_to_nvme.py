#!/usr/bin/env python3
"""Copy packed rows and base weights to a fast local disk, or report why not."""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.records import read_part
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec, StagingRecord
from expertflow.tokens.records import PackingRecord


def main(
    spec: StageSpec, expert: str, packing: PackingRecord, rows: Path, model: Path
) -> StagingRecord:
    base = Path(read_part(str, model, "path"))
    weights_sha256 = read_part(str, model, "weights_sha256")
    key = rows_key(packing.train.sha256, packing.held_out.sha256)
    return plan_staging(
        expert=expert,
        spec=spec,
        rows=read_content("rows", rows, key),
        weights=read_content("weights", base, weights_key(base, weights_sha256)),
    )


if __name__ == "__main__":
    cli.run_stage(main)
