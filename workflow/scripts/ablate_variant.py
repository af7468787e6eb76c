#!/usr/bin/env python3
"""Time one variant of an expert's plan against the plan, in alternating pairs."""

from pathlib import Path

from expertflow.core import cli
from expertflow.studies.ablate_variant import VariantJob, ablate_variant
from expertflow.studies.records import VariantSpec


def main() -> None:
    job = cli.stage(
        __doc__,
        VariantSpec,
        plan="plan.json",
        packing="packing.json",
        model="model.json",
        rows="folder of packed rows",
        shards={"type": Path, "nargs": "*", "default": [], "help": "document records"},
        keep={"type": Path, "help": "keep.arrow, to tokenize in the loop"},
        staging={"type": Path, "help": "staging.json, to compare read speeds"},
        scratch="folder to work in, removed",
        output="record to write",
    )
    names = ("spec", "plan", "packing", "model", "rows", "scratch", "keep", "staging")
    job.write(ablate_variant(VariantJob(shards=tuple(job.shards), **job.pick(*names))))


if __name__ == "__main__":
    cli.run(main, interrupted="this variant starts anew")
