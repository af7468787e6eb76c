#!/usr/bin/env python3
"""Time one variant of an expert's plan against the plan, in alternating pairs."""

from expertflow.core import cli
from expertflow.studies.ablate_variant import VariantJob, ablate_variant

if __name__ == "__main__":
    cli.run_stage(ablate_variant, takes=VariantJob, interrupted="this variant starts anew")
