#!/usr/bin/env python3
r"""Run a command on a rented machine; stop it in time, save its output, then stop paying.

    python workflow/scripts/guard_run.py --usd-per-hour 2.49 --max-usd 20 --idle-minutes 10 \
        --push s3://bucket/run1 --sync-to s3://bucket/run1 --on-finish 'runpodctl stop pod …' \
        -- snakemake --cores 8 results/expert-sql/report.json

Signals reach all processes of the command. At the end, results are copied and verified, the cost is
recorded in results/guard.json, and only then --on-finish runs. See docs/rented.md.

Exit code: the command's own; 128 + n after signal n; 80 budget, 81 idle cards, 82 standstill, 83
notice; 84 if something could not be copied, 85 if the stop command failed.
"""

import sys

from expertflow.core import cli
from expertflow.rental.guard.options import check_programs, parse_options
from expertflow.rental.guard.run import Guard


def main() -> None:
    options = parse_options(sys.argv[1:], __doc__)
    check_programs(options)
    sys.exit(Guard(options).run())


if __name__ == "__main__":
    cli.run(main)
