#!/usr/bin/env python3
"""Export packed rows as a data set that other trainers can use directly.

    python workflow/scripts/export_rows.py --rows results/expert-sql/packed/train --output rows-sql

Open it with ``datasets.load_from_disk``. Columns: input_ids, seq_lengths (lengths of a row's
documents) and labels (-100 where a token is not a target). Rows have no padding.
"""

from pathlib import Path

from expertflow.core import cli
from expertflow.tokens.export_rows import Targets, export_rows


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="folder of packed rows to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new")
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument("--labels", action="store_true", help="ids of the targets (default)")
    targets.add_argument(
        "--completion-mask", action="store_true", help="1 at targets, 0 elsewhere, instead of ids"
    )
    args = parser.parse_args()
    column: Targets = "completion_mask" if args.completion_mask else "labels"
    done = export_rows(args.rows, args.output, targets=column)
    print(
        f"{args.output}: {done.n_rows:,} rows, {done.n_tokens:,} tokens, "
        f"{done.n_target_tokens:,} of them targets"
    )


if __name__ == "__main__":
    cli.run(main)
