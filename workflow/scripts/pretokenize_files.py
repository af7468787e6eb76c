#!/usr/bin/env python3
r"""Tokenize and pack plain files without an expert, into the same rows as an expert's.

    python workflow/scripts/pretokenize_files.py --input 'data/*.jsonl' --output rows \
        --tokenizer DIR --length 2048 --prompt '{question}' --completion '{answer}'

Writes OUTPUT/train and OUTPUT/held_out (``datasets.load_from_disk`` opens them; export_rows.py adds
labels) and OUTPUT/packing.json with counts and lengths. See docs/tokens.md.
"""

import os
from pathlib import Path

from expertflow.config.plain_rows import describe_rows, make_rows
from expertflow.core import cli

TEMPLATES = ("prompt", "completion", "text", "messages")


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--input", required=True, help="a file or a glob: JSON Lines, CSV, Parquet, Arrow, text")
    add("--output", type=Path, required=True, help="folder to write; must be new")
    add("--tokenizer", type=Path, required=True, help="folder of a tokenizer, or of its model")
    add("--length", type=int, help="tokens per row; default: the shortest that cuts no document")
    add("--prompt", help="template of the question, e.g. '{question}'; with --completion")
    add("--completion", help="template of the answer")
    add("--text", help="template of a plain document; default: '{text}'")
    add("--messages", help="field with a list of turns")
    add("--packing", choices=("bfd", "concat", "none"), default="bfd", help="default: bfd")
    add("--cores", type=int, default=len(os.sched_getaffinity(0)), help="default: all")
    args = parser.parse_args()
    given = {name: value for name in TEMPLATES if (value := getattr(args, name)) is not None}
    if set(given) not in ({"prompt", "completion"}, {"text"}, {"messages"}, set()):
        parser.error("pass --prompt and --completion, or --text, or --messages")
    if args.cores < 1:
        # Snakemake would wait for a core forever.
        parser.error("--cores must be at least 1")
    record = make_rows(
        args.input,
        args.output,
        tokenizer=args.tokenizer,
        templates=given or {"text": "{text}"},
        length=args.length,
        packing=args.packing,
        n_cores=args.cores,
    )
    for line in describe_rows(record):
        print(line)


if __name__ == "__main__":
    cli.run(main)
